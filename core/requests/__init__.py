"""Requests of the core: state, deadlines, repetition detection, resumption."""
