"""Text state of one request: text sent, text held back, and the stop string that ended it; builder of `Text` messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quintet.detokenizer_proc.incremental import Decoder, PieceTable
from quintet.detokenizer_proc.output_parsing import OutputReader
from quintet.detokenizer_proc.stops import ROOT, Hit, StopAutomaton
from quintet.wire.channels import RowSpans
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.messages import Finish, Open, PositionLogprobs, RowLogprobs, Started, Text


class TextState:
    """Text and offsets of one request. Can be rebuilt from `Open` at any time."""

    __slots__ = (
        "_armed_after",
        "_decoder",
        "_held",
        "_include_stop",
        "_node",
        "_run_node",
        "_run_scanned",
        "_stops",
        "_table",
        "hit",
        "length",
        "num_tokens",
        "opened",
        "pieces",
        "prompt_logprobs",
        "prompt_text",
        "reader",
        "started",
    )

    def __init__(
        self,
        opened: Open,
        table: PieceTable,
        stops: StopAutomaton | None,
        reader: OutputReader | None = None,
        echo_table: PieceTable | None = None,
    ) -> None:
        """Start after the prompt and the outputs that the frontend has seen.

        ``reader`` parses the released text; ``echo_table`` is the table of an echoed prompt, if not ``table``.
        """
        self.opened = opened
        self.reader = reader
        self.started = False
        """True once `Started` was queued for the frontend."""
        self.num_tokens = 0
        """Output tokens applied."""
        self.length = 0
        """Characters of output text released, to the reader if there is one."""
        self.hit: str | None = None
        """The stop string that ended the text."""
        self.prompt_text: str | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            [None] * opened.num_prompt_tokens if opened.prompt_logprobs else None
        )
        """If requested: one entry per prompt token; the first is always None."""
        self._table = table
        self._stops = stops
        self._include_stop = opened.include_stop
        self._armed_after = opened.min_tokens  # first token, counted from 1, in which a stop string may end
        self._held = ""
        self._node = ROOT  # automaton node after the released and the held text
        self._run_node = ROOT  # automaton node after the tentative characters too
        self._run_scanned = 0  # tentative characters scanned
        self._decoder = self._begin(echo_table or table)
        self.pieces = table.pending
        """Table for the row loop's fast path; all entries are None while `add` must be called."""
        if opened.num_seen:
            self.add(unpack_i32(opened.output_ids)[: opened.num_seen])
            if reader is not None:
                reader.take_spans()

    @property
    def num_sent(self) -> int:
        """Characters of output text sent, after parsing."""
        return self.length if self.reader is None else self.reader.length

    @property
    def text_length(self) -> int:
        """Characters of output text, released or held."""
        return self.length + len(self._held) + self._decoder.tentative_length

    def _begin(self, echo_table: PieceTable) -> Decoder:
        opened = self.opened
        prompt_ids = unpack_i32(opened.prompt_ids)
        if opened.echo:
            decoder = echo_table.decoder()
            self.prompt_text = "".join([decoder.push(token_id) for token_id in prompt_ids]) + decoder.seal()
        return self._table.decoder(prompt_ids, whole=len(prompt_ids) == opened.num_prompt_tokens)

    def start(self) -> None:
        """Mark the request as started, which enables ``pieces`` for the row loop."""
        self.started = True
        self._update_pieces()

    def add(self, token_ids: Sequence[int], offsets: list[int] | None = None) -> str:
        """Apply output tokens up to a stop string; return the text to send.

        Appends to ``offsets``, per token, the number of output characters before it.
        """
        decoder, reader, released = self._decoder, self.reader, []
        for token_id in token_ids:
            self.num_tokens += 1
            if offsets is not None:
                offsets.append(self.text_length)
            if not self.opened.detokenize:
                continue
            text = decoder.push(token_id)
            if self._stops is None:
                self.length += len(text)
            else:
                text = self._search(self._stops, text, self.num_tokens >= self._armed_after)
            released.append(text if reader is None else reader.read(text))
            if self.hit is not None:
                if reader is not None:
                    released.append(reader.finish(is_cut=True))
                break
        self._update_pieces()
        return "".join(released)

    def add_silently(self, num_tokens: int) -> None:
        """Count tokens without text: the stop token that ended the request."""
        self.num_tokens += num_tokens

    def finish(self, *, is_cut: bool = False) -> str:
        """End the text; return the pending part, in which a stop string is a hit too.

        ``is_cut``: a limit ended the output, not the model.
        """
        if not self.opened.detokenize:
            return ""
        text = self._end()
        is_cut = is_cut or self.hit is not None
        return text if self.reader is None else self.reader.finish(text, is_cut=is_cut)

    def _end(self) -> str:
        text = self._decoder.flush()
        if self._stops is None:
            self.length += len(text)
            return text
        released = self._search(self._stops, text, self.num_tokens >= self._armed_after)
        if self.hit is None:
            self.length += len(self._held)
            released += self._held
            self._held = ""
        return released

    def _search(self, stops: StopAutomaton, text: str, armed: bool) -> str:
        """Scan final text, then tentative characters; return the text to release."""
        released = self._release_text(stops, text, armed) if text else ""
        tentative = self._decoder.tentative
        if self.hit is None and tentative:
            # ``decode`` of all tokens so far includes these characters. If they complete a stop string, the output
            # ends, and no later token can change them.
            if not self._run_scanned:
                self._run_node = self._node
            self._run_node, hit = stops.scan(self._run_node, tentative, armed)
            self._run_scanned += len(tentative)
            if hit is not None:
                end = self._run_scanned - len(tentative) + hit.end
                released += self._end_at(Hit(end, hit.stop), self._decoder.flush())
        return released

    def _release_text(self, stops: StopAutomaton, text: str, armed: bool) -> str:
        """Append final text to the held text; return the part that cannot belong to a stop string."""
        node, start = self._node, 0
        if self._run_scanned and not self._decoder.revoked:
            node, start = self._run_node, self._run_scanned  # already scanned as tentative, without a hit
        self._run_scanned = 0
        self._node, hit = stops.scan(node, text[start:] if start else text, armed)
        if hit is not None:
            return self._end_at(Hit(start + hit.end, hit.stop), text)
        whole = self._held + text
        cut = len(whole) - stops.hold[self._node]
        self._held = whole[cut:]
        self.length += cut
        return whole[:cut]

    def _end_at(self, hit: Hit, text: str) -> str:
        """End the output at a hit in ``text``, which follows the held text."""
        self.hit = hit.stop
        end = len(self._held) + hit.end
        cut = end if self._include_stop else end - len(hit.stop)
        released = (self._held + text)[:cut]
        self._held = ""
        self.length += cut
        return released

    def _update_pieces(self) -> None:
        if not self.opened.detokenize:
            table = self._table.silent
        else:
            is_plain = self._decoder.clean and self._stops is None and self.reader is None
            table = self._table.pieces if is_plain else self._table.pending
        self.pieces = table if self.started else self._table.pending


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
