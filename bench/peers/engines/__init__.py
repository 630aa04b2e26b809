"""Engines behind one interface: start, run a job, measure memory, stop."""
