"""Quintet inside Ray: an engine in each actor, for batches of Ray Data and for applications of Ray Serve."""
