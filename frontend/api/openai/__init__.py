"""OpenAI completions and chat APIs, with vLLM's extensions."""
