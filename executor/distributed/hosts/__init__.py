"""Stages of one model on several machines: ``docs/parallel.md``."""
