"""Detokenization of one step: `Tokens` of a core to one `Text` per frontend. This is the hot loop.

Owns the open requests and the columns of the messages in progress. `main` sends the messages of `Cores.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quintet.detokenizer_proc import logprobs
from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.output_parsing import OutputParsers
from quintet.detokenizer_proc.stops import StopAutomaton, StopCache
from quintet.detokenizer_proc.text_state import TextBuilder, TextState
from quintet.wire.channels import RowSpans
from quintet.wire.codec import unpack_i32, unpack_i64
from quintet.wire.ids import frontend_of
from quintet.wire.messages import Finish, FinishReason, Open, RowLogprobs, Started, Text, Tokens
from quintet.wire.step import DraftCounts, PromptLogprobs, TokenLogprobs

MAX_ENDED = 1 << 16
"""Requests ended by a stop string that are remembered until the core acknowledges it."""


class OpenRequest(TextState):
    """Text state of a request and the builder of its frontend."""

    __slots__ = ("builder", "drafts", "prompt_offsets")
    builder: TextBuilder
    drafts: DraftCounts | None
    """Draft tokens of its steps; None before the first."""
    prompt_offsets: Sequence[int] | None
    """Text offset of each prompt token, for an echoed prompt with log-probabilities, until the prompt is sent."""


class Steps:
    """Open requests of one core, and the application of steps to them."""

    def __init__(self, showing: PieceTable) -> None:
        """``showing`` is the table with special tokens."""
        self._showing = showing
        self._parsers = OutputParsers(showing)
        self._stops = StopCache()
        self._open: dict[int, OpenRequest] = {}
        self._builders: dict[tuple[int, int], TextBuilder] = {}
        self._ended: dict[int, int] = {}
        """Requests that a stop string ended, with the attempt, until the core ends them too."""
        self._mismatched: set[int] = set()
        """Requests that differed in the last reconciliation with the core."""
        self._core_epoch = 0
        self.stop_hits: list[tuple[int, int]] = []
        """(request id, attempt) of stop string hits since the last `take_stop_hits`."""

    def clone_empty(self) -> Steps:
        """Return an empty `Steps` for another core that shares tables, parsers and automata."""
        steps = Steps(self._showing)
        steps._parsers, steps._stops = self._parsers, self._stops
        return steps

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take_stop_hits(self) -> list[tuple[int, int]]:
        """Return and clear the stop string hits for the core, as (request id, attempt)."""
        hits, self.stop_hits = self.stop_hits, []
        return hits

    def compare(self, request_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Reconcile the open requests with the core's live requests. Differences count when seen twice in a row.

        Return the requests open only in this process, which are dropped, and those open only in the core.
        """
        in_core = set(request_ids).difference(self._ended)
        before, self._mismatched = self._mismatched, in_core ^ self._open.keys()
        confirmed = sorted(before & self._mismatched)
        stale = [request_id for request_id in confirmed if request_id in self._open]
        for request_id in stale:
            del self._open[request_id]
        return stale, [request_id for request_id in confirmed if request_id in in_core]

    def forget_frontend(self, index: int, epoch_tag: int) -> None:
        """Drop the requests of replaced frontends at ``index``: all epochs but this one."""
        for key in [key for key in self._builders if key[0] == index and key[1] != epoch_tag]:
            builder = self._builders.pop(key)
            for request_id in [i for i, request in self._open.items() if request.builder is builder]:
                del self._open[request_id]

    def release(self, request_ids: Iterable[int]) -> None:
        """Forget requests that another core has taken over."""
        for request_id in request_ids:
            self._open.pop(request_id, None)
            self._ended.pop(request_id, None)

    def abandon(self, request_ids: Iterable[int]) -> None:
        """Drop requests with undeliverable text, and stop the open ones in the core."""
        for request_id in request_ids:
            request = self._open.pop(request_id, None)
            if request is not None:
                self._queue_stop_hit(request)

    def accept_core(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the core's newest. A newer epoch drops the requests of earlier ones."""
        if epoch > self._core_epoch:
            self._core_epoch = epoch
            self._open.clear()
            self._ended.clear()
            self.stop_hits.clear()
        return epoch == self._core_epoch

    def apply(self, message: Tokens) -> list[tuple[TextBuilder, Text]]:
        """Apply one step's tokens; return the text for each frontend."""
        if not self.accept_core(message.core_epoch):
            return []
        if message.closed:
            for request_id in unpack_i64(message.closed):
                self._open.pop(request_id, None)
        for opened in message.opens:
            self._begin(opened)
        request_ids = unpack_i64(message.request_ids)
        for entry in message.prompt_logprobs:
            self._record_prompt(request_ids[entry.row], entry)
        if message.num_drafts:
            self._note_drafts(message, request_ids)
        self._apply_rows(message, request_ids)
        return [
            (builder, text)
            for builder in self._builders.values()
            if (text := builder.take(message.step, message.sent_ns)) is not None
        ]

    def _note_drafts(self, message: Tokens, request_ids: Sequence[int]) -> None:
        for row, num_drafts in enumerate(message.num_drafts):
            request = self._open.get(request_ids[row]) if num_drafts else None
            if request is not None:
                request.drafts = request.drafts or DraftCounts()
                request.drafts.note(num_drafts, message.num_tokens[row] - 1)

    def _apply_rows(self, message: Tokens, request_ids: Sequence[int]) -> None:
        entries: dict[int, list[TokenLogprobs]] = {}
        for entry in message.logprobs:
            entries.setdefault(entry.row, []).append(entry)
        find = self._open.get
        token_ids = unpack_i32(message.token_ids)
        named_stops = set(unpack_i32(message.named_stops))
        builder: TextBuilder | None = None
        end = 0
        firsts, counts = unpack_i32(message.first_indexes), message.num_tokens
        for row, (request_id, first, count, finish) in enumerate(
            zip(request_ids, firsts, counts, message.finishes, strict=True)
        ):
            start, end = end, end + count
            request = find(request_id)
            if (
                count == 1
                and not finish
                and (not entries or row not in entries)
                and request is not None
                and request.num_tokens == first
                and (piece := request.pieces[token_ids[start]]) is not None
            ):
                if request.builder is not builder:
                    builder, text = request.builder, request.builder.text
                    add_id, add_delta = text.request_ids.append, text.deltas.append
                    add_offset, add_first = text.offsets.append, text.first_indexes.append
                    add_count, add_token = text.num_tokens.append, builder.token_ids.append
                offset = request.length
                request.length = offset + len(piece)
                request.num_tokens = first + 1
                add_id(request_id)
                add_delta(piece)
                add_offset(offset)
                add_first(first)
                add_count(1)
                add_token(token_ids[start])
            elif request is None:  # a stop string ended it, or its `Open` has not arrived
                if finish:
                    self._ended.pop(request_id, None)
            elif count or finish:
                self._apply_row(
                    request,
                    first,
                    token_ids[start:end],
                    FinishReason(finish),
                    row in named_stops,
                    entries.get(row),
                )

    def text_state(self, opened: Open) -> TextState:
        """Return the text state of an output without an open request."""
        table, reader = self._parsers.table_of(opened), self._parsers.reader_of(opened)
        return TextState(opened, table, self._stops_of(opened), reader)

    def _stops_of(self, opened: Open) -> StopAutomaton | None:
        return self._stops.automaton(opened.stop) if opened.stop else None

    def _begin(self, opened: Open) -> None:
        request_id = opened.request_id
        ended = self._ended.get(request_id)
        if ended is not None and ended >= opened.attempt:  # the stop hit and this message crossed
            self.stop_hits.append((request_id, opened.attempt))
            return
        self._ended.pop(request_id, None)
        if opened.parsing is None and not opened.echo:
            table = self._showing.skipping if opened.skip_special_tokens else self._showing
            request = OpenRequest(opened, table, self._stops_of(opened))
        else:
            table, reader = self._parsers.table_of(opened), self._parsers.reader_of(opened)
            echo_table = self._parsers.echo_table_of(opened)
            request = OpenRequest(opened, table, self._stops_of(opened), reader, echo_table)
        request.builder = self._builder_of(request_id)
        request.prompt_offsets = request.drafts = None
        self._open[request_id] = request
        outputs = unpack_i32(opened.output_ids)
        if request.hit is not None:  # the frontend has the text up to the stop string, but not the finish
            self._queue_started(request)
            self._end(request, FinishReason.NONE, None)
        elif len(outputs) > opened.num_seen:
            self._apply_row(
                request, opened.num_seen, outputs[opened.num_seen :], FinishReason.NONE, False, None
            )

    def _builder_of(self, request_id: int) -> TextBuilder:
        key = frontend_of(request_id)
        builder = self._builders.get(key)
        if builder is None:
            builder = self._builders[key] = TextBuilder(*key)
        return builder

    def _apply_row(
        self,
        request: OpenRequest,
        first: int,
        token_ids: Sequence[int],
        finish: FinishReason,
        is_named_stop: bool,
        entries: list[TokenLogprobs] | None,
    ) -> None:
        """Apply a row by the slow path: first or last row, several tokens, decoder state, or a replay."""
        opened, builder = request.opened, request.builder
        self._queue_started(request)
        stop_id = token_ids[-1] if is_named_stop else None
        replayed = request.num_tokens - first
        assert replayed >= 0, f"request {opened.request_id}: token {first} arrived after {request.num_tokens}"
        token_ids = token_ids[replayed:]
        applied, offset = request.num_tokens, request.num_sent
        # The stop token is the last of its row; like a stop string, it is shown only with include_stop_str_in_output.
        num_silent = (
            1 if finish is FinishReason.STOP and token_ids and not opened.include_stop_str_in_output else 0
        )
        offsets: list[int] | None = [] if entries is not None else None
        delta = request.add(token_ids[: len(token_ids) - num_silent], offsets)
        if finish and request.hit is None:
            if num_silent:
                if offsets is not None:
                    offsets.append(request.text_length)
                request.num_tokens += num_silent
            delta += request.finish(is_cut=finish is not FinishReason.STOP)
        token_ids = token_ids[: request.num_tokens - applied]
        if token_ids or delta:
            if entries is not None and offsets is not None:
                base = len(request.prompt_text or "")
                positions = [
                    logprobs.of_token(self._showing, entry, base + token_offset)
                    for entry, token_offset in zip(entries[replayed:], offsets, strict=False)
                ]
                builder.text.logprobs.append(RowLogprobs(len(builder.text.request_ids), positions))
            if request.reader is not None and delta:
                builder.text.spans.append(
                    RowSpans(len(builder.text.request_ids), request.reader.take_spans())
                )
            builder.add(opened.request_id, delta, offset, applied, token_ids)
        if request.hit is not None or finish:
            self._end(request, finish, stop_id)

    def _queue_started(self, request: OpenRequest) -> None:
        if request.started:
            return
        opened, first_token = request.opened, None
        if opened.echo and opened.prompt_ids and request.prompt_logprobs is not None:
            (first_id,) = unpack_i32(opened.prompt_ids[:4])
            first_token = logprobs.position(self._showing, [first_id], [0.0], 0, 0).chosen
        started = Started(
            opened.request_id,
            opened.num_prompt_tokens,
            opened.num_cached_tokens,
            opened.arrival_ns,
            opened.scheduled_ns,
            opened.prompt_ids if opened.return_prompt_ids else b"",
            request.prompt_text,
            request.prompt_logprobs,
            first_token,
        )
        request.builder.text.started.append(started)
        request.prompt_offsets = None
        request.start()

    def _end(self, request: OpenRequest, finish: FinishReason, stop_id: int | None) -> None:
        request_id = request.opened.request_id
        del self._open[request_id]
        stop_reason: str | int | None = request.hit
        if request.hit is None:
            stop_reason = "repetition_detected" if finish is FinishReason.REPETITION else stop_id
        elif not finish:
            self._queue_stop_hit(request)
        reason = finish if request.hit is None else FinishReason.STOP
        ended = Finish(request_id, reason, stop_reason, request.num_tokens)
        if request.reader is not None:
            ended.num_reasoning_tokens = request.reader.num_reasoning_tokens
            ended.num_calls = request.reader.num_calls
        ended.drafts = request.drafts
        request.builder.text.finishes.append(ended)

    def _queue_stop_hit(self, request: OpenRequest) -> None:
        """Queue a stop hit for the core, and ignore its further rows for the request."""
        request_id, attempt = request.opened.request_id, request.opened.attempt
        self.stop_hits.append((request_id, attempt))
        self._ended[request_id] = attempt
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _record_prompt(self, request_id: int, entry: PromptLogprobs) -> None:
        request = self._open.get(request_id)
        if request is None or request.prompt_logprobs is None or request.started:
            return
        opened = request.opened
        if opened.echo and request.prompt_offsets is None:
            table = self._parsers.echo_table_of(opened)
            request.prompt_offsets = logprobs.prompt_offsets(table, unpack_i32(opened.prompt_ids))
        logprobs.of_prompt(self._showing, entry, request.prompt_logprobs, request.prompt_offsets)


class Cores:
    """One `Steps` per core, created by its first message. A request belongs to the core with the newest attempt.

    Cores do not communicate. When a core opens a newer attempt at a request, this process drops the rows that the previous
    core still sends.
    """

    def __init__(self, first: Steps) -> None:
        self._first = first
        self._steps = {0: first}

    @property
    def num_open(self) -> int:
        return sum(steps.num_open for steps in self._steps.values())

    def of(self, core: int) -> Steps:
        """Return the `Steps` of a core; create it if missing."""
        steps = self._steps.get(core)
        if steps is None:
            steps = self._steps[core] = self._first.clone_empty()
        return steps

    def apply(self, message: Tokens) -> list[tuple[TextBuilder, Text]]:
        """Apply one step's tokens; return the text for each frontend."""
        steps = self.of(message.core)
        moved = [opened.request_id for opened in message.opens if opened.attempt]
        if moved and steps.accept_core(message.core_epoch):
            for other in self._steps.values():
                if other is not steps:
                    other.release(moved)
        return steps.apply(message)

    def take_stop_hits(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return per core the requests that a stop string ended, as (request id, attempt). Cores without hits are omitted."""
        return [(core, hits) for core, steps in self._steps.items() if (hits := steps.take_stop_hits())]

    def abandon(self, request_ids: Sequence[int]) -> None:
        """Call `Steps.abandon` for every core."""
        for steps in self._steps.values():
            steps.abandon(request_ids)

    def forget_frontend(self, index: int, epoch_tag: int) -> None:
        """Call `Steps.forget_frontend` for every core."""
        for steps in self._steps.values():
            steps.forget_frontend(index, epoch_tag)

    def forget_core(self, core: int, epoch: int) -> None:
        """Drop the open requests of a core's process with this or an earlier epoch."""
        if core in self._steps:
            self._steps[core].accept_core(epoch + 1)
