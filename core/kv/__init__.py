"""KV memory as numbers: which block belongs to whom, and which block already holds which tokens."""
