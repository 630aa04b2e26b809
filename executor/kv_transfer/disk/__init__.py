"""KV blocks on disk: file formats."""
