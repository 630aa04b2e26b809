"""Resumable streams: after a lost connection, frontend or server."""
