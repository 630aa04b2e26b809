"""Prompt size in tokens, estimated without a tokenizer."""

from __future__ import annotations

from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BYTES_PER_TOKEN = 4
"""Mean bytes per token of text over languages and vocabularies. The exact count in `Started` is too late for admission."""


def embeds_bytes(prompt: Prompt) -> int:
    """Return the bytes of a prompt's embeddings; 0 for text or ids."""
    return len(prompt.values) if isinstance(prompt, EmbedsPrompt) else 0


def num_prompt_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt, estimated for text."""
    match prompt:
        case TextPrompt():
            num_bytes = _num_bytes(prompt.text) + (_num_bytes(prompt.suffix) if prompt.suffix else 0)
        case ChatPrompt():
            num_bytes = len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case TokenPrompt():
            return len(prompt.token_ids) // 4
        case EmbedsPrompt():
            return prompt.span.num_tokens
    return -(-num_bytes // BYTES_PER_TOKEN)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
