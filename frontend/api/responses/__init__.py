"""Responses, as OpenAI names them: items, events, and what is kept of both."""
