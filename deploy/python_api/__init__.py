"""The pieces of the Python API: engine processes of one's own, what goes in, what comes out.

`quintet.deploy.python_api.offline` puts them together as ``LLM`` and ``AsyncLLM``.
"""
