"""Model files: config, tokenizer, chat templates, weights, and where they come from."""
