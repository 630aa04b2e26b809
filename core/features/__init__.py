"""Scheduling features, one module each, attached to the scheduler by the hooks of `quintet.core.hooks`."""
