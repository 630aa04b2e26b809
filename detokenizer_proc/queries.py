"""Texts without a request: a `DetokenizeQuery` is decoded in slices, between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quintet.detokenizer_proc.rows import Steps
from quintet.detokenizer_proc.text_state import TextState
from quintet.process.sockets import Peers
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Detokenized, DetokenizeQuery, Failed, Open
from quintet.wire.params import check_token_ids
from quintet.wire.request import Echo

QUERY_SLICE = 4096
"""Tokens of a query decoded per loop iteration; bounds the delay of a step by a query."""


class QueryJob:
    """A `DetokenizeQuery` in progress, decoded in slices."""

    def __init__(self, query: DetokenizeQuery, token_ids: Sequence[int], state: TextState) -> None:
        self.query = query
        self._token_ids = token_ids
        self._state = state
        self._position = 0
        self._parts: list[str] = []

    def advance(self) -> Detokenized | None:
        """Decode one slice; return the answer after the last slice."""
        state, end = self._state, self._position + QUERY_SLICE
        self._parts.append(state.add(self._token_ids[self._position : end]))
        self._position = end
        if end < len(self._token_ids) and state.hit is None:
            return None
        if state.hit is None:
            self._parts.append(state.finish(is_cut=self.query.is_cut))
        answer = Detokenized(self.query.query_id, "".join(self._parts))
        reader = state.reader
        if reader is not None:
            answer.spans = reader.take_spans()
            answer.num_reasoning_tokens, answer.num_calls = reader.num_reasoning_tokens, reader.num_calls
        return answer


def failed_query(query_id: int, error: RequestError) -> Detokenized:
    """Return the error answer to a query."""
    return Detokenized(query_id, "", Failed(query_id, error.code, error.message, error.param))


def _open_without_request(query_id: int) -> Open:
    """Return the `Open` of a text without a request: empty prompt, special tokens shown."""
    return Open(query_id, 0, 0, b"", [], False, False, True, Echo.NONE, False, 0, 0, 0)


class Queries:
    """The queries in progress; each gets a slice in turn."""

    def __init__(self, peers: Peers, steps: Steps, vocab_size: int) -> None:
        """``steps``: makes the text state of a query."""
        self._peers = peers
        self._steps = steps
        self._vocab_size = vocab_size
        self.jobs: deque[QueryJob] = deque()

    def accept(self, query: DetokenizeQuery) -> None:
        """Start a query, or answer it with an error."""
        token_ids = unpack_i32(query.token_ids)
        try:
            check_token_ids(token_ids, self._vocab_size, "tokens")
        except RequestError as error:
            self._peers.send(Role.FRONTEND, query.frontend, failed_query(query.query_id, error))
            return
        state = self._steps.text_state(query.opened or _open_without_request(query.query_id))
        self.jobs.append(QueryJob(query, token_ids, state))

    def advance(self) -> None:
        """Decode one slice of the first query; send the answer after its last slice."""
        job = self.jobs.popleft()
        query, answer = job.query, job.advance()
        if answer is None:
            self.jobs.append(job)
            return
        try:
            self._peers.send(Role.FRONTEND, query.frontend, answer)
        except FrameTooLarge as error:
            cause = f"The text has {error.num_bytes} bytes, but at most {error.most} are allowed; send fewer tokens."
            failed = failed_query(query.query_id, RequestError(ErrorCode.TOO_LARGE, cause, "tokens"))
            self._peers.send(Role.FRONTEND, query.frontend, failed)
