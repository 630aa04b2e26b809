"""Shared KV stores: chunk format and connectors."""
