"""What a GGUF file says besides its weights: tokenizer, chat templates, where answers end, how to sample."""
