"""Parsers of outputs into content, reasoning and tool calls: pure state machines over text. `registry` lists them."""
