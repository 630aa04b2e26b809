"""The tokenizer process: text and chat messages to token ids."""
