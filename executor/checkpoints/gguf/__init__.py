"""GGUF: one file with weights, configuration, tokenizer and chat template, converted to the engine's common structures."""
