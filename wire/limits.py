"""Maximum frame size per role: the size of its largest message, derived from the configuration.

An inbox rejects larger frames before reading them and closes the sender's connection with its queued frames. So these
are upper bounds, and no sender exceeds them: `process/sockets.py` raises `FrameTooLarge` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quintet.wire.config import EngineConfig
from quintet.wire.embeds import WIDEST_BYTES
from quintet.wire.ids import Role
from quintet.wire.params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_STOP_CHARS
from quintet.wire.pooling import ITEM_BYTES
from quintet.wire.request import MAX_SCHEMAS_BYTES
from quintet.wire.structured import MAX_COMPILED_BYTES

LEAST_BYTES = 16 << 20
"""Minimum for every inbox: small models have long metrics too."""

MOST_BYTES = 1 << 30
"""Maximum for every inbox, whatever the configuration."""

MAX_NEW_ROW_BYTES = MOST_BYTES // 4
"""Size of a plan's new rows after which no further request enters; the rest of the frame is for embeddings."""

ID_BYTES = 5
"""Bytes of a token id in a list; in a column it has 4."""

ENTRY_BYTES = 128
"""Bytes of one log-probability with its token's text."""

MAX_BEAM_CANDIDATES = 256
"""Log-probabilities per position in beam search, independent of the client's limit."""

ROW_BYTES = 1 << 10
"""Bytes of a request's fields of fixed size, and its parts in other columns."""

MOST_FRONTENDS = 8
"""Minimum number of frontends in one message; more if more are configured."""

TOKENIZED_GROWTH = 16
"""Maximum growth from text to ids and their spelling: per byte, 4 bytes of an id, and ``<0xFF>`` in a list."""

JSON_GROWTH = 4
"""Maximum growth of a request body: ``1,`` of its JSON becomes four bytes of a column."""


class FrameTooLarge(OverflowError):
    """A message exceeds its receiver's limit. Nothing was sent."""

    def __init__(self, num_bytes: int, role: Role, most: int) -> None:
        super().__init__(f"{num_bytes} bytes for the {role}, which accepts at most {most}")
        self.num_bytes = num_bytes
        self.most = most


def largest_frames(config: EngineConfig) -> Mapping[Role, int]:
    """Return `largest_frame` of every role."""
    return {role: largest_frame(role, config) for role in Role}


def largest_frame(role: Role, config: EngineConfig) -> int:
    """Return the size in bytes of the largest payload for a process of this role."""
    bound = _BOUNDS[role](config)
    return min(MOST_BYTES, max(LEAST_BYTES, bound))


def _request(config: EngineConfig) -> int:
    """Size of one request as ids, with its outputs and parameters."""
    model = config.model
    # Each bad word is encoded twice, with up to four tokens per character, and sent as text of up to four bytes too.
    words = (8 * ID_BYTES + 4) * MAX_BAD_WORDS * MAX_BAD_WORD_CHARS + 4 * MAX_STOP_CHARS + MAX_COMPILED_BYTES
    # Four lists of ids, and one map from an id to a float of 9 bytes.
    params = 6 * ID_BYTES * model.vocab_size
    return 8 * model.max_model_len + params + words + ROW_BYTES + config.frontend.max_body_bytes


def _embeds(config: EngineConfig) -> int:
    """Size of embeddings for every token of a step."""
    if not config.frontend.prompt_embeds:
        return 0
    return config.scheduler.max_num_batched_tokens * config.model.embedding_width * WIDEST_BYTES


def _logprobs(config: EngineConfig) -> int:
    """Size of the log-probabilities of all positions of one step."""
    asked = config.frontend.max_logprobs
    width = 2 + (config.model.vocab_size if asked is None else asked)
    max_tokens, max_num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    num_entries = max((max_tokens + max_num_seqs) * width, max_num_seqs * (2 + MAX_BEAM_CANDIDATES))
    return num_entries * ENTRY_BYTES


def _vectors(config: EngineConfig) -> int:
    """Size of the pooled vectors of all rows of a step."""
    pooling = config.model.pooling
    return 0 if pooling is None else config.scheduler.max_num_seqs * (ROW_BYTES + ITEM_BYTES * pooling.width)


def _all_opens(config: EngineConfig) -> int:
    """Size of the `Open` messages of all requests of all frontends, sent at once to a new detokenizer."""
    processes = config.processes
    frontends = max(MOST_FRONTENDS, processes.frontends + processes.external_frontends)
    return frontends * config.frontend.max_queued_requests * (ROW_BYTES + 4 * config.model.max_model_len)


_BOUNDS: Mapping[Role, Callable[[EngineConfig], int]] = {
    Role.SUPERVISOR: lambda config: LEAST_BYTES,
    Role.FRONTEND: lambda config: (
        _all_opens(config) + _logprobs(config) + TOKENIZED_GROWTH * config.frontend.max_body_bytes
    ),
    Role.TOKENIZER: lambda config: JSON_GROWTH * config.frontend.max_body_bytes + _request(config),
    Role.CORE: lambda config: _request(config) + _logprobs(config) + _vectors(config),
    Role.EXECUTOR: lambda config: (
        config.scheduler.max_num_seqs * (_request(config) - config.frontend.max_body_bytes) + _embeds(config)
    ),
    Role.DETOKENIZER: lambda config: (
        _all_opens(config) + _logprobs(config) + config.scheduler.max_num_seqs * MAX_SCHEMAS_BYTES
    ),
}  # fmt: skip
