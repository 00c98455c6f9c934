"""Model families that run on the ragged batch."""
