"""How fast a model decodes on this machine, and beside mlx-lm: ``omlx-worker bench``.

Uses the engine and what decides the depth of drafts; knows no queue. Only the command line, and
only when it is asked for, imports it.
"""
