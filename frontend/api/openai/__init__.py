"""OpenAI's dialect: completions, chats, and what vLLM adds to them."""
