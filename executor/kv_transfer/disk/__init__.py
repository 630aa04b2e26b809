"""Blocks of KV memory in files: what they look like, and whose they are."""
