"""Text state of one request: text sent, text held back, and the stop string that ended it; builder of `Text` messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.output_parsing import OutputReader
from quintet.detokenizer_proc.stops import StopAutomaton, StopSearch
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.messages import Open, PositionLogprobs, Text


class TextState:
    """Text and offsets of one request. Can be rebuilt from `Open` at any time."""

    __slots__ = (
        "_decoder",
        "_search",
        "_table",
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
        self.prompt_text: str | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            [None] * opened.num_prompt_tokens if opened.prompt_logprobs else None
        )
        """If requested: one entry per prompt token; the first is always None."""
        self._table = table
        prompt_ids = unpack_i32(opened.prompt_ids)
        if opened.echo:
            decoder = (echo_table or table).decoder()
            self.prompt_text = "".join([decoder.push(token_id) for token_id in prompt_ids]) + decoder.seal()
        self._decoder = table.decoder(prompt_ids, whole=len(prompt_ids) == opened.num_prompt_tokens)
        self._search = (
            None if stops is None else StopSearch(stops, self._decoder, opened.include_stop_str_in_output)
        )
        self.pieces = table.pending
        """Table for the row loop's fast path; all entries are None while `add` must be called."""
        if opened.num_seen:
            self.add(unpack_i32(opened.output_ids)[: opened.num_seen])
            if reader is not None:
                reader.take_spans()

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._search is None else self._search.hit

    @property
    def num_sent(self) -> int:
        """Characters of output text sent, after parsing."""
        return self.length if self.reader is None else self.reader.length

    @property
    def text_length(self) -> int:
        """Characters of output text, released or held."""
        num_held = 0 if self._search is None else len(self._search.held)
        return self.length + num_held + self._decoder.tentative_length

    def start(self) -> None:
        """Mark the request as started, which enables ``pieces`` for the row loop."""
        self.started = True
        self._update_pieces()

    def add(self, token_ids: Sequence[int], offsets: list[int] | None = None) -> str:
        """Apply output tokens up to a stop string; return the text to send.

        Appends to ``offsets``, per token, the number of output characters before it.
        """
        decoder, reader, search, released = self._decoder, self.reader, self._search, []
        for token_id in token_ids:
            self.num_tokens += 1
            if offsets is not None:
                offsets.append(self.text_length)
            if not self.opened.detokenize:
                continue
            text = decoder.push(token_id)
            if search is not None:
                text = search.release(text, self.num_tokens >= self.opened.min_tokens, reader)
            self.length += len(text)
            released.append(text if reader is None else reader.read(text))
            if search is not None and search.hit is not None:
                if reader is not None:
                    released.append(reader.finish(is_cut=True))
                break
        self._update_pieces()
        return "".join(released)

    def finish(self, *, is_cut: bool = False) -> str:
        """End the text; return the pending part, in which a stop string is a hit too.

        ``is_cut``: a limit ended the output, not the model.
        """
        if not self.opened.detokenize:
            return ""
        text, search = self._decoder.flush(), self._search
        if search is not None:
            text = search.release(text, self.num_tokens >= self.opened.min_tokens, self.reader)
            text += search.take_held() if search.hit is None else ""
        self.length += len(text)
        is_cut = is_cut or self.hit is not None
        return text if self.reader is None else self.reader.finish(text, is_cut=is_cut)

    def _update_pieces(self) -> None:
        if not self.opened.detokenize:
            table = self._table.silent
        else:
            is_plain = self._decoder.clean and self._search is None and self.reader is None
            table = self._table.pieces if is_plain else self._table.pending
        self.pieces = table if self.started else self._table.pending


class TextBuilder:
    """`Text` of one frontend for the current step."""

    __slots__ = ("epoch_tag", "index", "text", "token_ids")

    def __init__(self, index: int, epoch_tag: int) -> None:
        self.index = index
        self.epoch_tag = epoch_tag
        self._begin()

    def _begin(self) -> None:
        self.text = Text(0, 0, 0, [], [], [], [], [], [], b"", [], [], spans=[])
        self.token_ids: list[int] = []

    def add(self, request_id: int, delta: str, offset: int, first: int, token_ids: Sequence[int]) -> None:
        text = self.text
        text.request_ids.append(request_id)
        text.deltas.append(delta)
        text.offsets.append(offset)
        text.first_indexes.append(first)
        text.num_tokens.append(len(token_ids))
        self.token_ids.extend(token_ids)

    def take(self, step: int, tokens_sent_ns: int) -> Text | None:
        """Return the message and begin the next one; None if it is empty."""
        text = self.text
        if not (text.request_ids or text.finishes or text.started):
            return None
        text.step, text.sent_ns, text.tokens_sent_ns = step, time.monotonic_ns(), tokens_sent_ns
        text.token_ids = pack_i32(self.token_ids)
        self._begin()
        return text
