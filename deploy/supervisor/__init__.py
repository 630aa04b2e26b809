"""The supervisor: starts the processes, watches them, tells everyone who is there. It carries no request data."""
