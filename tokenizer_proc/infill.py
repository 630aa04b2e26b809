"""Fill-in-the-middle prompts: prefix and suffix between the model's FIM tokens.

The format is detected by the tokens of the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer

from quintet.tokenizer_proc.long_texts import encoded, special_tokens_around
from quintet.wire.errors import RequestError, invalid


class InfillPart(Enum):
    """Text between FIM tokens."""

    PREFIX = 0
    SUFFIX = 1


P, S = InfillPart.PREFIX, InfillPart.SUFFIX

FORMATS: tuple[tuple[str | InfillPart, ...], ...] = (
    ("<|fim_prefix|>", P, "<|fim_suffix|>", S, "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", P, "<fim_suffix>", S, "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", P, "<fim-suffix>", S, "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", P, "<｜fim▁hole｜>", S, "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", P, "▁<SUF>", S, "▁<MID>"),  # CodeLlama
    ("[SUFFIX]", S, "[PREFIX]", P),  # Codestral
)
ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>"),
    *("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|repo_name|>"),
)
"""Tokens that end the filled-in text, if the tokenizer has them."""

NEUTRAL = "☺"
"""Prefix for encoding a text without an added leading space, as the models' reference code does."""


@dataclass(frozen=True, slots=True)
class Infill:
    """Fill-in-the-middle format of one model."""

    tokenizer: Tokenizer
    layout: tuple[int | InfillPart, ...]
    end_ids: list[int]
    """Stop tokens."""

    def ids(self, prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        """Return the prompt ids for generating the text between ``prefix`` and ``suffix``."""
        found = special_tokens_around(self.tokenizer)[0] if add_special_tokens else []
        for part in self.layout:
            match part:
                case InfillPart.PREFIX:
                    found += encoded(self.tokenizer, prefix)
                case InfillPart.SUFFIX:
                    found += self._bare(suffix)
                case _:
                    found.append(part)
        return found

    def _bare(self, text: str) -> list[int]:
        """Return a text's ids without the leading space that some tokenizers add."""
        if not self.tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("▁"):
            return encoded(self.tokenizer, text)
        before, whole = encoded(self.tokenizer, NEUTRAL), encoded(self.tokenizer, NEUTRAL + text)
        return whole[len(before) :] if whole[: len(before)] == before else encoded(self.tokenizer, text)


def open_infill(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> Infill | None:
    """Return the fill-in-the-middle format of a tokenizer; None if it has no FIM tokens."""

    def id_of(mark: str) -> int | None:
        found: int | None = tokenizer.token_to_id(mark)
        return found if found is not None and found < vocab_size else None

    for layout in FORMATS:
        ids = [each if isinstance(each, InfillPart) else id_of(each) for each in layout]
        known = tuple(each for each in ids if each is not None)
        if len(known) == len(layout):
            marks = [each for each in known if not isinstance(each, InfillPart)]
            ends = [found for mark in ENDS if (found := id_of(mark)) is not None]
            return Infill(tokenizer, known, [each for each in (*marks, *ends) if each not in eos_token_ids])
    return None


def no_infill() -> RequestError:
    """Build the error for a suffix sent to a model without FIM tokens."""
    return invalid(
        "suffix was sent, but the model's tokenizer has no fill-in-the-middle tokens: remove it, or serve a model trained "
        "for it (StarCoder, CodeLlama, Qwen Coder, DeepSeek Coder, Codestral, CodeGemma).",
        "suffix",
    )
