"""Offline bulk generation: a file of requests in, a file of results out, resumable at any moment.

A row goes one way: `readers` -> `making` -> `planning` -> `ordering` -> `runner` -> a sink, which
is a pair of files (`output`) or, for a detached batch, Redis (`batch_sink`). A row's job id
follows from the run, the row's custom_id and its request, so whoever runs the same row again finds
the job that is already there. A result leaves Redis only after it is safe in the sink, and the
sink alone says what is done; so the process may be killed between any two steps.
"""
