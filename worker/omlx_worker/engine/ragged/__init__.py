"""One batch of rows, each with its own length, drafts and sampling."""
