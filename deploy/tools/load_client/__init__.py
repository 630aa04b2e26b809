"""Light-weight load client for OpenAI-compatible endpoints.

Designed to share two cores with the measured server: httptools parses HTTP/1.1, each socket read has one time stamp, and only
the first and last frames of a stream are parsed as JSON. Independent of Quintet's processes.
"""
