"""Executor halves of scheduling features, each named like its half in ``core/features``."""
