"""Grammar enforcement for structured outputs, with llguidance.

The tokenizer process validates grammars and the executor enforces them, with the same vocabulary and limits. So the
executor can build every grammar that the tokenizer accepts. See docs/structured.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

MAX_STATES = 50_000
"""Maximum lexer states of a grammar, which are built on demand: 20 MB."""

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def open_vocabulary(model: ModelConfig) -> LLTokenizer:
    """Return the model's vocabulary in llguidance's format. Takes 0.1 s for 32,000 tokens.

    Raises `ConfigError` where the library cannot read it, or the model has no end-of-sequence token.
    """
    from llguidance import LLTokenizer  # a library of 8 MB that most processes never need

    if not model.eos_token_ids:
        raise ConfigError("the model config has no eos_token_id, so structured outputs could not end")
    path = Path(model.tokenizer_path) / "tokenizer.json"
    try:
        text = path.read_text()
        described = msgspec.json.decode(text, type=_Tokenizer)
        most = max(model.vocab_size, _num_tokens(described))
        return LLTokenizer(
            _with_special_tokens_alone(text, described), n_vocab=most, eos_token=model.eos_token_ids
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"llguidance cannot read the model's tokenizer: {error}") from None


def named_tokens(model: ModelConfig) -> dict[str, int]:
    """Return the ids of tokens outside the text vocabulary, by their names.

    These are special tokens, and tokens like Qwen's ``<tool_call>`` that appear in text. Models generate them as one
    token, so a grammar must reference them by id.
    """
    described = msgspec.json.decode(
        (Path(model.tokenizer_path) / "tokenizer.json").read_text(), type=_Tokenizer
    )
    return {token.content: token.id for token in described.added_tokens if _is_named(token, described)}


def _is_named(token: _Token, described: _Tokenizer) -> bool:
    vocab = described.model.vocab
    return token.special or not isinstance(vocab, dict) or token.content not in vocab


def _with_special_tokens_alone(text: str, described: _Tokenizer) -> str:
    """Return a tokenizer file with only the special ones of its added tokens.

    The library treats every added token as special. It would accept the others where only their text is allowed, and
    then reject that text.
    """
    if all(token.special for token in described.added_tokens):
        return text
    whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(whole["added_tokens"], type=list[dict[str, Any]])
    whole["added_tokens"] = msgspec.Raw(msgspec.json.encode([each for each in added if each.get("special")]))
    return msgspec.json.encode(whole).decode()


def _num_tokens(described: _Tokenizer) -> int:
    """Return the largest token id plus 1; the model may have fewer or more logits."""
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
    """Return the limits on a grammar's size and work per step."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=200_000, max_lexer_states=MAX_STATES, verbose_errors=False)


def open_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of an answer. One that cannot be built reports it (`LLMatcher.get_error`)."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, grammar, log_level=0, limits=bounds())
