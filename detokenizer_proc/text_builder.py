"""Builder of `Text` messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quintet.wire.channels import RowSpans
from quintet.wire.codec import pack_i32
from quintet.wire.messages import Finish, RowLogprobs, Started, Text


class TextBuilder:
    """Columns of one frontend's `Text` for the current step."""

    __slots__ = (
        "deltas",
        "epoch_tag",
        "finishes",
        "first_indexes",
        "index",
        "logprobs",
        "num_tokens",
        "offsets",
        "request_ids",
        "spans",
        "started",
        "token_ids",
    )

    def __init__(self, index: int, epoch_tag: int) -> None:
        self.index = index
        self.epoch_tag = epoch_tag
        self._begin()

    def _begin(self) -> None:
        self.started: list[Started] = []
        self.request_ids: list[int] = []
        self.deltas: list[str] = []
        self.offsets: list[int] = []
        self.first_indexes: list[int] = []
        self.num_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.finishes: list[Finish] = []
        self.logprobs: list[RowLogprobs] = []
        self.spans: list[RowSpans] = []

    def add(self, request_id: int, delta: str, offset: int, first: int, token_ids: Sequence[int]) -> None:
        """Add a row."""
        self.request_ids.append(request_id)
        self.deltas.append(delta)
        self.offsets.append(offset)
        self.first_indexes.append(first)
        self.num_tokens.append(len(token_ids))
        self.token_ids.extend(token_ids)

    def take(self, step: int, tokens_sent_ns: int) -> Text | None:
        """Return the message and clear the columns; None if they are empty."""
        if not (self.request_ids or self.finishes or self.started):
            return None
        text = Text(
            step,
            time.monotonic_ns(),
            tokens_sent_ns,
            self.started,
            self.request_ids,
            self.deltas,
            self.offsets,
            self.first_indexes,
            self.num_tokens,
            pack_i32(self.token_ids),
            self.finishes,
            self.logprobs,
            spans=self.spans,
        )
        self._begin()
        return text
