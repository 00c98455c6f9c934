"""Claiming, committing and handing back jobs, in Lua over RQ's own keys. Knows no engine."""
