"""Everything around the five processes: the command line, the resolved configuration and the supervisor.

This is the one folder that may import any other; the process folders never import it.
"""
