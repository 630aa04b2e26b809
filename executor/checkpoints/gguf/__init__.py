"""GGUF: one file with weights, configuration, tokenizer and chat template, read into what the other formats are read into."""
