"""Flags of KV tiers and KV events."""
