"""The `omlx-submit` command."""
