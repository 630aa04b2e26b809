"""Quintet and Ray: an engine in each actor, for Ray Data and Ray Serve, and the hosts of a model as actors on several nodes."""
