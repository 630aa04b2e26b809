"""The supervisor: starts the processes, watches their heartbeats and publishes the topology. It carries no request data."""
