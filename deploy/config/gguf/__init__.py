"""GGUF metadata: tokenizer, chat templates, end-of-sequence ids, sampling defaults."""
