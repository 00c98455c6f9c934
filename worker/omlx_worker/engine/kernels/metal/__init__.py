"""The default implementations: plain forms, which run on every device."""
