"""Scheduling features, one file each, joined to the scheduler by the hooks of `quintet.core.hooks`."""
