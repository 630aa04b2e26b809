"""From logits to tokens: one file per concern, the whole batch at once."""
