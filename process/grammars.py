"""The library that enforces structured outputs, as the two processes open it that use it: llguidance.

The tokenizer process asks it whether a grammar can be enforced, the executor has it do so: both with the same vocabulary and the
same bounds, so that what the one lets through the other can build. Knows nothing of requests. See docs/structured.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

MAX_STATES = 50_000
"""Of the automaton that a grammar's expressions become as they are met: 20 MB."""

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def open_vocabulary(model: ModelConfig) -> LLTokenizer:
    """Return the model's vocabulary as the library reads it. Takes a tenth of a second for 32,000 tokens.

    Raises `ConfigError` where the library cannot read it, or the model has no end of sequence to end an answer with.
    """
    from llguidance import LLTokenizer  # a library of 8 MB that most processes never need

    if not model.eos_token_ids:
        raise ConfigError("the model names no end of sequence, so that no answer of a given form could end")
    path = Path(model.tokenizer_path) / "tokenizer.json"
    try:
        text = path.read_text()
        described = msgspec.json.decode(text, type=_Tokenizer)
        most = max(model.vocab_size, _num_tokens(described))
        return LLTokenizer(
            _with_special_tokens_alone(text, described), n_vocab=most, eos_token=model.eos_token_ids
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"the model's tokenizer cannot be read for it: {error}") from None


def named_tokens(model: ModelConfig) -> dict[str, int]:
    """Return the ids of the tokens that stand beside the vocabulary of a model's text, by their names.

    These are special tokens, and those like Qwen's ``<tool_call>`` that are told as text: models write their names with them
    alone, so a grammar has to name them by their ids.
    """
    described = msgspec.json.decode(
        (Path(model.tokenizer_path) / "tokenizer.json").read_text(), type=_Tokenizer
    )
    return {token.content: token.id for token in described.added_tokens if _is_named(token, described)}


def _is_named(token: _Token, described: _Tokenizer) -> bool:
    vocab = described.model.vocab
    return token.special or not isinstance(vocab, dict) or token.content not in vocab


def _with_special_tokens_alone(text: str, described: _Tokenizer) -> str:
    """Return a tokenizer whose added tokens are the special ones.

    The library takes any added token for a special one: it lets the others through where their names are the only text that is
    allowed, and then finds that they are not that text.
    """
    if all(token.special for token in described.added_tokens):
        return text
    whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(whole["added_tokens"], type=list[dict[str, Any]])
    whole["added_tokens"] = msgspec.Raw(msgspec.json.encode([each for each in added if each.get("special")]))
    return msgspec.json.encode(whole).decode()


def _num_tokens(described: _Tokenizer) -> int:
    """Return one more than the largest id that a tokenizer has: the model may have logits for fewer or for more."""
    ids = [token.id for token in described.added_tokens]
    vocab = described.model.vocab
    ids.append(max(vocab.values(), default=0) if isinstance(vocab, dict) else len(vocab) - 1)
    return 1 + max(ids)


class _Token(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = {}


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_Token] = []


def bounds() -> LLParserLimits:
    """Return how much work a grammar may make: to be built, and in a step."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=200_000, max_lexer_states=MAX_STATES, verbose_errors=False)


def open_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the beginning of an answer. One that cannot be built says so (`LLMatcher.get_error`)."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, grammar, log_level=0, limits=bounds())
