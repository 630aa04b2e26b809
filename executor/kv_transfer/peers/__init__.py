"""Blocks of KV memory that servers fetch from one another: who offers them, who asks, and what they say."""
