"""The engine under every parser: text that is not consumed yet, a state that consumes it, pieces that came of it.

Whitespace beside a mark belongs to the mark: a model puts it there because its template does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.pieces import ChannelText
from quintet.wire.channels import Channel

MAX_NAME = 256
"""Characters of a function's name or of a parameter's: what is longer is none, so little is ever held back."""


class Machine:
    """A state machine over text.

    A state is a function of the machine that consumes from ``_text`` and returns whether the state it left behind should
    go on at once; False waits for more text. With ``_over`` there will be none: it consumes all or changes the state.
    """

    def __init__(self, state: Callable[..., bool]) -> None:
        self.is_reasoning = False
        self._state = state
        self._text = ""
        self._over = False
        self._is_cut = False
        self._pieces: list[ChannelText] = []

    def push(self, text: str) -> list[ChannelText]:
        """See `Parser`."""
        self._text += text
        return self._run()

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`."""
        self._over, self._is_cut = True, is_cut
        return self._run()

    def _run(self) -> list[ChannelText]:
        while self._state(self):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, channel: Channel, text: str, call: int = 0) -> None:
        if text:
            self._pieces.append(ChannelText(channel, call, text))


class Prose:
    """Text of one channel between marks: what stands at its ends and is blank is left out beside a mark."""

    __slots__ = ("_blank", "_leading", "channel")

    def __init__(self, channel: Channel, *, leading: bool) -> None:
        """``leading``: a mark has just ended, so blanks that come first are left out."""
        self.channel = channel
        self._blank: list[str] = []
        self._leading = leading

    def take(self, text: str) -> str:
        """Return what can be told: blanks at the end wait for what follows."""
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
        """Forget blanks before a mark, and leave out those that follow it."""
        self._blank, self._leading = [], True

    def end(self) -> str:
        """Return the blanks at the end of the whole text."""
        blank, self._blank = "".join(self._blank), []
        return blank


class CallReader(Machine):
    """Content with calls in it, each begun by a mark. Subclasses read what follows the mark.

    What is consumed from the mark on is kept in ``_raw`` until it certainly is a call (`_announce`) or certainly none
    (`_refuse`): then it is content.
    """

    def __init__(self, begins: Marks, state: Callable[..., bool] | None = None) -> None:
        super().__init__(state or CallReader._content)
        self._begins = begins
        self._prose = Prose(Channel.CONTENT, leading=False)
        self._num_calls = 0
        self._expects_calls = False
        """Whether the output has a call, or a mark that stands around several."""
        self._raw: list[str] = []
        self._is_raw = False

    def _content(self) -> bool:
        before, mark, self._text = self._begins.split(self._text)
        if mark:
            self._say(before)
            return self._meet(mark)
        if self._is_cut and self._text and (self._expects_calls or self._begins.is_half(self._text)):
            self._say(before)
            return self._drop()
        if self._over:
            before, self._text = before + self._text, ""
        self._say(before)
        if self._over:
            self._tell(Channel.CONTENT, self._prose.end())
        return False

    def _meet(self, mark: str) -> bool:
        """Go on behind a mark in the content."""
        self._attempt(mark)
        self._state = type(self)._begun
        return True

    def _begun(self) -> bool:
        """Read what follows the mark that begins a call."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        self._tell(Channel.CONTENT, self._prose.take(text))

    def _attempt(self, consumed: str) -> None:
        """Remember what is consumed from here on: it may turn out to be no call."""
        self._raw, self._is_raw = [consumed], True

    def _take(self, num_chars: int) -> str:
        """Consume characters."""
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        if self._is_raw:
            self._raw.append(taken)
        return taken

    def _skip_blanks(self) -> bool:
        """Consume blanks; return whether there is something else."""
        rest = self._text.lstrip()
        if len(rest) < len(self._text):
            self._take(len(self._text) - len(rest))
        return bool(rest)

    def _announce(self, name: str) -> None:
        """It is a call: tell its name."""
        self._raw, self._is_raw = [], False
        self._prose.at_mark()
        self._tell(Channel.NAME, name, self._num_calls)
        self._num_calls += 1
        self._expects_calls = True

    def _argue(self, text: str) -> None:
        self._tell(Channel.ARGUMENTS, text, self._num_calls - 1)

    def _is_begun_call(self) -> bool:
        """Whether what was consumed can hardly be anything but the beginning of a call."""
        return bool(self._raw and self._raw[0])

    def _drop(self) -> bool:
        """Leave out what is left of a call, or of the marks around it, that the end of the output cut off."""
        self._text = ""
        self._prose.at_mark()
        return self._return()

    def _refuse(self) -> bool:
        """It is no call: what was consumed of it is content, and so is what follows."""
        if self._is_cut and self._is_begun_call():
            return self._drop()
        raw, self._raw, self._is_raw = "".join(self._raw), [], False
        self._say(raw)
        return self._return()

    def _return(self) -> bool:
        """Go on with content."""
        self._raw, self._is_raw = [], False
        self._state = type(self)._content
        return True


class ListReader(CallReader):
    """Calls that may stand in a list, one behind the other. Subclasses read each (`_begun`), and then go on with `_after`."""

    def __init__(
        self,
        begins: Sequence[str],
        ends: Sequence[str],
        separators: str,
        *,
        is_bare: bool,
    ) -> None:
        """separators: what may stand between two calls; ``{`` belongs to the second. is_bare: lines may begin with a call."""
        super().__init__(Marks(*begins, *(("\n",) if is_bare else ())))
        self._ends = Marks(*ends)
        self._separators = separators
        self._is_list = False
        self._is_inside = False
        """Whether another call may follow without a mark."""
        if is_bare:
            self._attempt("")
            self._state = type(self)._begun

    def _is_begun_call(self) -> bool:
        return self._is_inside or super()._is_begun_call()

    def _meet(self, mark: str) -> bool:
        if mark == "\n":
            self._say(mark)
            mark = ""
        self._is_list = self._is_inside = False
        return super()._meet(mark)

    def _end_once(self, is_read: bool) -> bool:
        """Go on behind a call once it ``is_read``, or where the output ends in it."""
        if not (is_read or self._over):
            return False
        self._state = type(self)._after
        return True

    def _after(self) -> bool:
        """Read what follows a call: another one, the end of a list, a mark, or content."""
        if not self._skip_blanks():
            return self._return() if self._over else False
        sign = self._text[0]
        if self._is_inside and sign in self._separators:
            self._attempt("")
            if sign != "{":
                self._take(1)
            self._state = type(self)._begun
            return True
        if sign == "]" and self._is_list:
            self._take(1)
            self._is_list = False
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
        return self._return()
