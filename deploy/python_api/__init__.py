"""Python API: local engine processes, inputs and outputs.

Entry points are in `quintet.deploy.python_api.offline`: ``LLM``, ``AsyncLLM`` and ``LLMEngine``.
"""
