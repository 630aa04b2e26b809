"""What a frontend's seat tells the others it waits for, so that they find what either has lost. Reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from quintet.frontend.streams import Choice
from quintet.wire.codec import pack_i32, pack_i64
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Handed, Live

Account = tuple[Role, int, msgspec.Struct]
"""Whom to send it to, and the message."""


def accounts_of(me: WorkerId, core: int, choices: Iterable[Choice]) -> Iterator[Account]:
    """Return the accounts of these choices, which have not ended: to ``core`` of all, and on each path of what took it."""
    ids: list[int] = []
    by_path: dict[tuple[int, int], list[Choice]] = {}
    for choice in choices:
        ids.append(choice.request_id)
        if choice.stream.tokenizer is not None:
            by_path.setdefault((choice.stream.tokenizer, choice.stream.submit.core), []).append(choice)
    yield Role.CORE, core, Live(me, pack_i64(ids))
    for (tokenizer, its_core), handed in by_path.items():
        request_ids = pack_i64(choice.request_id for choice in handed)
        attempts = pack_i32(choice.stream.attempt for choice in handed)
        yield Role.TOKENIZER, tokenizer, Handed(me, tokenizer, its_core, request_ids, attempts)
