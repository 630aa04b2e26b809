"""Anthropic Messages API."""
