"""Stores of KV that several servers share: what is kept there, and who keeps it."""
