"""How fast a model decodes on this machine, and beside mlx-lm: ``omlx-worker bench``.

Uses the engine and the depth policies; knows no queue. The command line imports it on demand, and
`scripts/bench` measures with it.
"""
