"""Text to be written between a prompt and a suffix, in the marks that a model was trained to fill in by.

Which marks a model knows is read off its tokenizer: they are tokens of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer

from quintet.wire.errors import ErrorCode, RequestError


class InfillPart(Enum):
    """What stands between marks."""

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
"""What such models write behind what they filled in, if their tokenizers have it."""

NEUTRAL = "☺"
"""What a text is encoded behind so that no blank is put before it: as the models' own code does."""


@dataclass(frozen=True, slots=True)
class Infill:
    """How one model fills in."""

    tokenizer: Tokenizer
    layout: tuple[int | InfillPart, ...]
    end_ids: list[int]
    """Tokens behind which there is nothing more to fill in."""

    def ids(self, prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        """Return the prompt behind which what lies between two texts is written."""
        found = self._begin() if add_special_tokens else []
        for part in self.layout:
            match part:
                case InfillPart.PREFIX:
                    found += self._encode(prefix)
                case InfillPart.SUFFIX:
                    found += self._bare(suffix)
                case _:
                    found.append(part)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _begin(self) -> list[int]:
        """Return what the tokenizer puts before every text."""
        whole: list[int] = self.tokenizer.encode(NEUTRAL, add_special_tokens=True).ids
        own = self._encode(NEUTRAL)
        at = next(i for i in range(len(whole)) if whole[i : i + len(own)] == own)
        return whole[:at]

    def _bare(self, text: str) -> list[int]:
        """Return a text's ids without the blank that some tokenizers put before it."""
        if not self.tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith("▁"):
            return self._encode(text)
        before, whole = self._encode(NEUTRAL), self._encode(NEUTRAL + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._encode(text)


def open_infill(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> Infill | None:
    """Return how a model fills in, as its tokenizer says; None where it knows no such marks."""

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
    """Make the error for a suffix that the model has no marks for."""
    return RequestError(
        ErrorCode.INVALID,
        "suffix was sent, but the model's tokenizer has no tokens to fill in between two texts by: leave it out, or serve a "
        "model that was trained for it (StarCoder, CodeLlama, Qwen Coder, DeepSeek Coder, Codestral, CodeGemma).",
        "suffix",
    )
