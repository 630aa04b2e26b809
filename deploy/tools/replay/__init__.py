"""Replays the recording of one process, and compares its output."""
