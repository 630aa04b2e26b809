"""Streams that continue after a lost connection, a lost frontend or a lost server."""
