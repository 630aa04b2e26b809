"""Quintet as a worker of FastChat: a process beside a server, known to a controller."""
