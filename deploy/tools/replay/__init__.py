"""Plays the recording of one process to that process alone, and compares what it does."""
