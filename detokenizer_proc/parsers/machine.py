"""Base state machine of the parsers: unread text, a state that consumes it, and the emitted deltas.

Whitespace next to a mark belongs to the mark, because chat templates put it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from quintet.detokenizer_proc.parsers.interface import ChannelText
from quintet.detokenizer_proc.parsers.json_repair import JsonRepair
from quintet.detokenizer_proc.parsers.json_scan import JsonValue, quoted
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.wire.channels import Channel

LINE = "\n"
"""Mark before a call that begins a line."""
FENCE = "```"
PART_OF_FENCE = re.compile(r"`{1,2}|```\w{0,16}\s{0,64}")
MAX_SLICE = 4096
"""Characters read at once: states copy the unread text, so the work is linear in a long text."""


def slices(text: str) -> list[str]:
    """Divide a text into parts of at most `MAX_SLICE` characters."""
    return [text[at : at + MAX_SLICE] for at in range(0, len(text), MAX_SLICE)]


class Machine:
    """A state machine over text.

    A state is a method that consumes from ``_text`` and may set the next state. It returns True to run the next state
    at once, or False to wait for more text. If ``_over``, no more text comes: a state consumes all of it or changes the
    state.
    """

    def __init__(self, state: Callable[..., bool]) -> None:
        self.is_reasoning = False
        self._state = state
        self._text = ""
        self._over = False
        self._is_cut = False
        self._deltas: list[ChannelText] = []

    def push(self, text: str) -> list[ChannelText]:
        if len(text) <= MAX_SLICE:
            self._text += text
            return self._run()
        return [delta for part in slices(text) for delta in self.push(part)]

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        self._over, self._is_cut = True, is_cut
        return self._run()

    def _run(self) -> list[ChannelText]:
        while self._state(self):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, channel: Channel, text: str, call: int = 0) -> None:
        if text:
            self._deltas.append(ChannelText(channel, call, text))


class Prose:
    """Text of one channel between marks. Whitespace next to a mark is removed."""

    __slots__ = ("_blank", "_leading", "channel")

    def __init__(self, channel: Channel, *, leading: bool) -> None:
        """``leading``: a mark precedes the text, so leading whitespace is removed."""
        self.channel = channel
        self._blank: list[str] = []
        self._leading = leading

    def take(self, text: str) -> str:
        """Return the text to emit. Trailing whitespace is held back until the next text."""
        if self._leading:
            text = text.lstrip()
            if not text:
                return ""
            self._leading = False
        kept = text.rstrip()
        blank = text[len(kept) :]
        if kept:
            kept, self._blank = "".join(self._blank) + kept, []
        if blank:
            self._blank.append(blank)
        return kept

    def at_mark(self) -> None:
        """Drop the whitespace before a mark, and remove the whitespace after it."""
        self._blank, self._leading = [], True

    def end(self) -> str:
        """Return the trailing whitespace at the end of the output."""
        blank, self._blank = "".join(self._blank), []
        return blank


class CallReader(Machine):
    """Parses content with calls, each begun by a mark. Subclasses read the text after the mark.

    Text consumed from the mark on is kept in ``_raw`` until it is certain to be a call (`_start_call`). If it is no call
    (`_reject`), it becomes content.
    """

    def __init__(self, begins: Marks, state: Callable[..., bool] | None = None) -> None:
        super().__init__(state or CallReader._content)
        self._begins = begins
        self._prose = Prose(Channel.CONTENT, leading=False)
        self._num_calls = 0
        self._num_values = 0  # of the current call
        self._object = JsonValue("{")
        self._repair = JsonRepair()
        self._expects_calls = False
        """True once the output has a call, or a mark around a group of calls."""
        self._raw: list[str] = []
        self._is_raw = False
        self.is_stopped = False
        """True if the reader of another format must continue (`EitherCalls`)."""
        self._openings: tuple[str, ...] = ()
        self._after_mark: Callable[..., bool] = CallReader._content
        self.reads_one = False
        """True to read only the calls after one mark, then stop."""

    def stop_at(self, openings: tuple[str, ...]) -> None:
        """Stop after a mark that one of ``openings`` follows."""
        self._openings = openings
        if self._is_raw:  # the text may begin with a call
            self._after_mark, self._state = self._state, CallReader._before_call

    def resume(self, before: CallReader) -> list[ChannelText]:
        """Continue where a reader of another format stopped."""
        before.is_stopped = False
        self._text, before._text = before._text, ""
        self._prose, self._num_calls = before._prose, before._num_calls
        self._expects_calls = before._expects_calls
        self._over, self._is_cut = before._over, before._is_cut
        if self.reads_one:
            self._on_mark(before._raw[0])
            self._raw, before._raw, before._is_raw = before._raw, [], False
        else:
            self._return()
        return self._run()

    def _before_call(self) -> bool:
        """Stop if a call of another format follows the mark."""
        self._skip_blanks()
        head = "[" + self._text[1:].lstrip() if self._text[:1] == "[" else self._text
        if any(map(head.startswith, self._openings)):
            self.is_stopped = True
            return False
        if not self._over and any(opening.startswith(head) for opening in self._openings):
            return False
        self._state = self._after_mark
        return True

    def _content(self) -> bool:
        if self.reads_one:
            self.is_stopped = True
            return False
        before, mark, self._text = self._begins.split(self._text)
        if mark:
            self._emit_prose(before)
            if self._on_mark(mark) and self._openings:
                self._after_mark, self._state = self._state, CallReader._before_call
            return True
        if self._is_cut and self._text and (self._expects_calls or self._begins.is_half(self._text)):
            self._emit_prose(before)
            return self._drop()
        if self._over:
            before, self._text = before + self._text, ""
        self._emit_prose(before)
        if self._over:
            self._emit(Channel.CONTENT, self._prose.end())
        return False

    def _on_mark(self, mark: str) -> bool:
        self._attempt(mark)
        self._state = type(self)._read_start
        return True

    def _read_start(self) -> bool:
        """Read the text after the mark that begins a call."""
        raise NotImplementedError

    def _after(self) -> bool:
        """Read the text after a call."""
        raise NotImplementedError

    def _emit_prose(self, text: str) -> None:
        self._emit(Channel.CONTENT, self._prose.take(text))

    def _attempt(self, consumed: str) -> None:
        """Start to record consumed text, which may turn out to be no call."""
        self._raw, self._is_raw = [consumed], True

    def _take(self, num_chars: int) -> str:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        if self._is_raw:
            self._raw.append(taken)
        return taken

    def _skip_blanks(self) -> bool:
        """Consume whitespace; return whether other text remains."""
        rest = self._text.lstrip()
        if len(rest) < len(self._text):
            self._take(len(self._text) - len(rest))
        return bool(rest)

    def _start_call(self, name: str) -> None:
        """Accept a call and emit its name."""
        self._raw, self._is_raw = [], False
        self._prose.at_mark()
        self._emit(Channel.NAME, name, self._num_calls)
        self._num_calls += 1
        self._num_values = 0
        self._expects_calls = True

    def _emit_arguments(self, text: str) -> None:
        self._emit(Channel.ARGUMENTS, text, self._num_calls - 1)

    def _next_key(self, key: str) -> str:
        """Return the JSON of a key, with a comma after the last value."""
        self._num_values += 1
        return ("" if self._num_values == 1 else ", ") + quoted(key) + ": "

    def _begin_object(self) -> bool:
        """Read all arguments as one JSON object, which some models write in place of their format's."""
        self._object, self._repair = JsonValue("{"), JsonRepair()
        self._state = CallReader._in_object
        return True

    def _in_object(self) -> bool:
        self._emit_arguments(self._repair.take(self._take(self._object.read(self._text))))
        if self._object.is_over or self._over:
            self._emit_arguments(self._repair.end(is_cut=self._is_cut and not self._object.is_over))
        return self._end_once(self._object.is_over)

    def _end_once(self, is_read: bool) -> bool:
        """Continue after a call once it ``is_read``, or when the output ends within it."""
        if not (is_read or self._over):
            return False
        self._state = type(self)._after
        return True

    def _is_partial_call(self) -> bool:
        """Return whether the consumed text is very likely the beginning of a call."""
        return bool(self._raw and self._raw[0])

    def _drop(self) -> bool:
        """Drop the rest of a call, or of a mark, that the end of the output truncated."""
        self._text = ""
        self._prose.at_mark()
        return self._return()

    def _reject(self) -> bool:
        """Reject the call: the consumed text and the text after it are content."""
        if self._is_cut and self._is_partial_call():
            return self._drop()
        raw, self._raw, self._is_raw = "".join(self._raw), [], False
        self._emit_prose(raw)
        return self._return()

    def _return(self) -> bool:
        self._raw, self._is_raw = [], False
        self._state = type(self)._content
        return True


class ListReader(CallReader):
    """Parses calls that may be in a list. Subclasses read each call (`_read_start`) and continue with `_after`."""

    def __init__(
        self,
        begins: Sequence[str],
        ends: Sequence[str],
        separators: str,
        *,
        bare: Sequence[str] = (),
    ) -> None:
        """``separators``: characters between two calls; ``{`` belongs to the second.

        ``bare``: `LINE`, if a line may begin a call, or characters that begin a call anywhere.
        """
        super().__init__(Marks(*begins, *bare))
        self._bare = frozenset(bare)
        self._ends = Marks(*ends)
        self._separators = separators
        self._surplus = ""  # closing brackets that may be repeated after a call; ignored
        self._is_list = False
        self._is_fenced = False  # a code fence is around the calls
        self._is_inside = False
        """True if another call may follow without a mark."""
        if bare:
            self._attempt("")
            self._state = type(self)._read_start

    def _is_partial_call(self) -> bool:
        return self._is_inside or super()._is_partial_call()

    def _on_mark(self, mark: str) -> bool:
        if mark == LINE:
            self._emit_prose(mark)
        elif mark in self._bare:
            self._text = mark + self._text
        if mark in self._bare:
            mark = ""
        self._is_list = self._is_fenced = self._is_inside = False
        return super()._on_mark(mark)

    def _read_fence(self, pattern: re.Pattern[str]) -> bool:
        """Read a code fence before calls."""
        fence = pattern.match(self._text)
        if fence is None:
            is_part = PART_OF_FENCE.fullmatch(self._text) is not None
            return False if is_part and not self._over else self._reject()
        self._take(fence.end())
        self._is_fenced = True
        return True

    def _skip_list_end(self) -> bool:
        """Consume the end of a list that is empty or has a comma before it; return whether there is one."""
        if not (self._is_list and self._text[0] == "]" and (self._is_inside or self._raw[0])):
            return False
        self._take(1)
        self._raw, self._is_raw = [], False
        self._prose.at_mark()
        self._is_list = False
        self._state = type(self)._after
        return True

    def _after(self) -> bool:
        """Read the text after a call: another call, the end of a list or a code fence, a mark, or content."""
        if not self._skip_blanks():
            return self._return() if self._over else False
        if self._is_fenced and FENCE.startswith(self._text[: len(FENCE)]):
            if len(self._text) < len(FENCE) and not self._over:
                return False
            self._take(len(FENCE))
            self._is_fenced = self._is_inside = False
            return True
        sign = self._text[0]
        if self._is_inside and sign in self._separators:
            self._attempt("")
            if sign != "{":
                self._take(1)
            self._state = type(self)._read_start
            return True
        if sign == "]" and self._is_list:
            self._take(1)
            self._is_list = False
            return True
        if sign in self._surplus and self._is_inside:
            self._take(1)
            return True
        end = self._ends.at_start(self._text)
        if end == "" and not self._over:
            return False
        if end == "" and self._is_cut:
            return self._drop()
        if end:
            self._take(len(end))
            self._is_inside = False
            return True
        is_unmarked = LINE in self._bare and self._begins.at_start(self._text) is None
        return self._on_mark(LINE) if is_unmarked and not self.reads_one else self._return()
