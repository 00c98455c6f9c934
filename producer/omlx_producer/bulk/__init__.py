"""Offline bulk generation: a file of requests in, a file of results out, resumable at any moment.

docs/architecture.md follows a row from the file to the table. `input` owns what makes rows of it:
`records`, `shape` and `plan`. `driver` owns the `collector`, which takes them through batches, and
`progress`. `library` gives all this to programs: rows may then be in memory (`given`), and results
may go to the program (`stream`).

A result leaves Redis only after it is durable in the files, and only they say which rows are done.
So the process may be killed between any two steps.
"""
