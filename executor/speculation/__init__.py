"""Speculative decoding: draft tokens, their number, and their verification."""
