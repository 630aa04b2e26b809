"""Protocol between Quintet's processes: messages, parameters, limits and metrics.

This package only imports the standard library and msgspec. `quintet.process` transports the messages.
"""
