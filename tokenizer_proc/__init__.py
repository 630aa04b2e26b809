"""The tokenizer process: text and conversations to ids."""
