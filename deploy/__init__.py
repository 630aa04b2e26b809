"""Command line, configuration, supervisor, router, Python API and integrations.

This folder may import all other folders; the process folders never import it.
"""
