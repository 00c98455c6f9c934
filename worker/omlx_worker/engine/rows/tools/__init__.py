"""Calls of tools: how families write them, the grammars that hold models to that, the reading."""
