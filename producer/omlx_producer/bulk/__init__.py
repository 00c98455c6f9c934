"""Offline bulk generation: a file of requests in, a file of results out, resumable at any moment.

The path of a row: `records` reads it, `shape` makes its request, `plan` decides whether it runs,
`ordering` decides when. For a run on this machine (`run`), `feed` enqueues its job and collects the
result into a pair of files (`output`). A detached `batch` is uploaded, and workers do the rest.

A job's id follows from the run and the row, so running a row again finds the existing job. A result
leaves Redis only after it is durable in the files, and only they say which rows are done. So the
process may be killed between any two steps.
"""
