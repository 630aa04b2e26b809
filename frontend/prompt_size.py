"""How large a prompt is, as far as the frontend can tell: it does not encode."""

from __future__ import annotations

from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BYTES_PER_TOKEN = 4
"""What a token of text has about, in languages and vocabularies alike; `Started` tells the truth too late for the door."""


def embeds_bytes(prompt: Prompt) -> int:
    """Return the size of a prompt's vectors; 0 for one of text or ids."""
    return len(prompt.values) if isinstance(prompt, EmbedsPrompt) else 0


def num_prompt_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt, estimated where it is text."""
    match prompt:
        case TextPrompt():
            num_bytes = _num_bytes(prompt.text) + (_num_bytes(prompt.suffix) if prompt.suffix else 0)
        case ChatPrompt():
            num_bytes = len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case TokenPrompt():
            return len(prompt.token_ids) // 4
        case EmbedsPrompt():
            return prompt.num_tokens
    return -(-num_bytes // BYTES_PER_TOKEN)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
