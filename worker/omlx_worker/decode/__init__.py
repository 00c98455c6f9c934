"""The decode thread: which rows run next, how deep they draft, what they may take."""
