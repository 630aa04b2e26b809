"""Construction of a request's parser from the formats that its names select.

Chain of parsers: the tool call parser reads the content of the reasoning parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from quintet.detokenizer_proc.parsers.formats import REASONING, SECOND, TOOLS, HarmonyFormat, MessageCalls
from quintet.detokenizer_proc.parsers.harmony import Harmony
from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser
from quintet.detokenizer_proc.parsers.json_calls import JsonCalls, JsonFormat
from quintet.detokenizer_proc.parsers.literal_calls import LiteralCalls, LiteralFormat
from quintet.detokenizer_proc.parsers.machine import MAX_SLICE, CallReader, slices
from quintet.detokenizer_proc.parsers.marks import Marks
from quintet.detokenizer_proc.parsers.messages import MessageFormat, Messages
from quintet.detokenizer_proc.parsers.nested_calls import NestedCalls, NestedFormat
from quintet.detokenizer_proc.parsers.schemas import Schemas
from quintet.detokenizer_proc.parsers.tag_format import TagFormat
from quintet.detokenizer_proc.parsers.tagged_calls import TaggedCalls
from quintet.detokenizer_proc.parsers.thinking import KeptReasoning, LateCloseFilter, ThinkFormat, Thinking
from quintet.wire.channels import Channel
from quintet.wire.config import CallIds


class Chain:
    """Reasoning parser, then tool call parser, then a filter for a closing mark that follows a call."""

    def __init__(self, reasoning: Thinking, tools: Parser, late: LateCloseFilter) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._late = late
        self._num_content = 0

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[ChannelText]:
        return self._forward(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        found = self._forward(self._reasoning.finish(is_cut=is_cut))
        parsed = self._tools.finish(is_cut=is_cut)
        found += parsed if self._reasoning.content_before_break is None else self._filter_close(parsed)
        return found + self._late.finish(is_cut=is_cut)

    def _forward(self, deltas: Iterable[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for delta in deltas:
            if delta.channel is not Channel.CONTENT:
                found.append(delta)
                continue
            at = self._reasoning.content_before_break
            is_after_break = at is not None and self._num_content >= at
            self._num_content += len(delta.text)
            parsed = self._tools.push(delta.text)
            found += self._filter_close(parsed) if is_after_break else parsed
        return found

    def _filter_close(self, deltas: list[ChannelText]) -> list[ChannelText]:
        found: list[ChannelText] = []
        for delta in deltas:
            found += self._late.push(delta.text) if delta.channel is Channel.CONTENT else [delta]
        return found


class EitherCalls:
    """Parses content with one reader, and the calls of a second format with another.

    For models that write another format than their template's in the same marks.
    """

    is_reasoning = False

    def __init__(self, first: CallReader, second: CallReader, openings: tuple[str, ...]) -> None:
        """``openings``: text after a mark that begins a call of the second format."""
        self._reader, self._other = first, second
        first.stop_at(openings)
        second.reads_one = True

    def push(self, text: str) -> list[ChannelText]:
        if len(text) <= MAX_SLICE:
            return self._follow(self._reader.push(text))
        return [delta for part in slices(text) for delta in self.push(part)]

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        return self._follow(self._reader.finish(is_cut=is_cut))

    def _follow(self, deltas: list[ChannelText]) -> list[ChannelText]:
        while self._reader.is_stopped:
            self._reader, self._other = self._other, self._reader
            deltas = deltas + self._reader.resume(self._other)
        return deltas


class Spellings:
    """Replaces other spellings of marks in the text of a parser."""

    def __init__(self, parser: Parser, usual: Mapping[str, str]) -> None:
        """``usual``: the usual spelling of each other one."""
        self._parser = parser
        self._usual = usual
        self._marks = Marks(*usual)
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    def push(self, text: str) -> list[ChannelText]:
        parts, at, text = list[str](), 0, self._held + text
        while True:
            begin, mark = self._marks.search(text, at)
            parts.append(text[at:begin])
            if not mark:
                break
            parts.append(self._usual[mark])
            at = begin + len(mark)
        self._held = text[begin:]
        return self._parser.push("".join(parts))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`. Part of a mark at the end of a cut output is replaced by the same part of the usual one."""
        held = self._held
        if held and is_cut:
            usual = next(usual for mark, usual in self._usual.items() if mark.startswith(held))
            held = next(held[:end] for end in range(len(held), -1, -1) if usual.startswith(held[:end]))
        return self._parser.push(held) + self._parser.finish(is_cut=is_cut)


def needs_schemas(tools: str) -> bool:
    """Return whether arguments of this format are untyped, so that the parser needs the tools' schemas."""
    form = TOOLS.get(tools)
    return isinstance(form.calls if isinstance(form, MessageCalls) else form, TagFormat | NestedFormat)


def call_ids(tools: str) -> CallIds:
    """Return the kind of call ids that chat templates of this format require."""
    match tools:
        case "mistral":
            return "short"
        case "kimi_k2":
            return "numbered"
        case _:
            return "random"


def fit(reasoning: str, tools: str) -> bool:
    """Return whether two parsers (empty: none) can be combined for one output."""
    thought, form = REASONING.get(reasoning), TOOLS.get(tools)
    thought = None if isinstance(thought, ThinkFormat) else thought
    calls = (
        form.messages if isinstance(form, MessageCalls) else form if isinstance(form, HarmonyFormat) else None
    )
    return not (reasoning and tools) or thought == calls


def marks_of(reasoning: str, tools: str) -> frozenset[str]:
    """Return the special tokens that these parsers (empty: none) must see as text."""
    formats = (*([REASONING[reasoning]] if reasoning else ()), *([TOOLS[tools]] if tools else ()))
    return frozenset().union(*(form.marks for form in formats))


def build(reasoning: str, tools: str, schemas: bytes, prompt: str) -> Parser:
    """Build the parser of one output: reasoning, tool calls or both.

    ``schemas`` is the JSON of the request's tools; ``prompt`` is the end of the prompt's text, with special tokens.
    """
    assert reasoning or tools
    thought = REASONING[reasoning] if reasoning else None
    if isinstance(thought, HarmonyFormat) or (tools and isinstance(TOOLS[tools], HarmonyFormat)):
        return Harmony(with_reasoning=bool(reasoning), with_calls=bool(tools))
    if isinstance(thought, ThinkFormat) and thought.is_kept:
        return KeptReasoning(thought, prompt, build("", tools, schemas, prompt) if tools else None)
    form, types = TOOLS[tools] if tools else None, Schemas(schemas)
    if isinstance(thought, MessageFormat) or isinstance(form, MessageCalls):
        messages = form.messages if isinstance(form, MessageCalls) else thought
        assert isinstance(messages, MessageFormat)
        calls = partial(_calls, tools, types) if tools else None
        return Messages(messages, prompt, calls, with_reasoning=bool(reasoning))
    if form is None:
        assert thought is not None
        return Thinking(thought, prompt)
    build_calls = partial(_calls, tools, types)
    parser = build_calls()
    if thought is not None:
        thinking = Thinking(thought, prompt, call_marks(tools), build_calls)
        parser = Chain(thinking, parser, LateCloseFilter(thought))
    if isinstance(form, TagFormat) and form.spellings:
        return Spellings(parser, dict(form.spellings))
    return parser


def call_marks(tools: str) -> frozenset[str]:
    """Return the marks that begin calls or groups of calls. Calls without a mark are not detected in reasoning."""
    form = TOOLS.get(tools)
    match form:
        case JsonFormat():
            return frozenset((*form.begins, *form.around)) - frozenset(form.ends)
        case LiteralFormat():
            return frozenset(form.begins)
        case TagFormat():
            function = (form.function,) if form.can_omit_begin else ()
            return frozenset((*form.begins, *form.around, *function))
        case NestedFormat():
            return frozenset({form.mark})
        case _:
            return frozenset()


def _calls(tools: str, schemas: Schemas) -> Parser:
    form = TOOLS[tools]
    if isinstance(form, HarmonyFormat):
        return Harmony(with_reasoning=False, with_calls=True)
    reader = _reader(form.calls if isinstance(form, MessageCalls) else form, schemas)
    if tools not in SECOND:
        return reader
    second, openings = SECOND[tools]
    return EitherCalls(reader, _reader(second, schemas), openings)


def _reader(form: JsonFormat | LiteralFormat | TagFormat | NestedFormat, schemas: Schemas) -> CallReader:
    match form:
        case JsonFormat():
            return JsonCalls(form)
        case LiteralFormat():
            return LiteralCalls(form)
        case TagFormat():
            return TaggedCalls(form, schemas)
        case NestedFormat():
            return NestedCalls(form, schemas)
