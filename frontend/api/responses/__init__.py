"""OpenAI Responses API: items, events, stored and background responses."""
