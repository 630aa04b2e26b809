"""Ids in, ids out."""
