"""Token-in, token-out API."""
