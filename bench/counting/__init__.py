"""Trace of the Python code that the processes of a server run."""
