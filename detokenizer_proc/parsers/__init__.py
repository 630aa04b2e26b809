"""Output read as content, reasoning and calls of tools: pure state machines over text. `registry` knows them by name."""
