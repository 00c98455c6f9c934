"""Offline bulk generation: a file of requests in, a file of results out, resumable at any moment.

The path of a row: `records` reads it, `shape` makes its request, `plan` decides whether and when it
runs; `input` owns the three. It goes into a `batch`, from which workers take it. A detached batch
is left to them. For a run on this machine (`run`), `collector` uploads a window of rows ahead and
collects their results into files (`output`), and `progress` shows it. `library` gives all this to
programs: rows may then be in memory (`given`), and results may go to the program (`stream`).

A result leaves Redis only after it is durable in the files, and only they say which rows are done.
So the process may be killed between any two steps.
"""
