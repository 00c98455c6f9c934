"""Offline bulk generation: a file of requests in, a file of results out, resumable at any moment.

The path of a row: `records` reads it, `shape` makes its request, `plan` decides whether it runs,
`ordering` decides when, and `feed` enqueues its job and collects the result. The result goes to a
sink: a pair of files (`output`) for a run on this machine (`run`), Redis for a detached batch
(`batch`, `batch_feeder`).

A job's id follows from the run, the row's custom_id and its request, so running a row again finds
the existing job. A result leaves Redis only after the sink has made it durable, and only the sink
says which rows are done. So the process may be killed between any two steps.
"""
