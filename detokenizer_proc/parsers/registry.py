"""Registry of parsers by name, and construction of a request's parser.

A format of a known type is one entry. A new type of format needs a new module in this folder.

Chain of parsers: the tool call parser reads the content of the reasoning parser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quintet.detokenizer_proc.parsers.either_calls import EitherCalls
from quintet.detokenizer_proc.parsers.harmony import Harmony
from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser
from quintet.detokenizer_proc.parsers.json_calls import JsonCalls, JsonFormat
from quintet.detokenizer_proc.parsers.literal_calls import LiteralCalls, LiteralFormat
from quintet.detokenizer_proc.parsers.literals import GEMMA
from quintet.detokenizer_proc.parsers.machine import FENCE, LINE, CallReader
from quintet.detokenizer_proc.parsers.schemas import Schemas
from quintet.detokenizer_proc.parsers.tagged_calls import TagFormat, TaggedCalls
from quintet.detokenizer_proc.parsers.thinking import EmbeddedCalls, LateCloseFilter, ThinkFormat, Thinking
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
        """See `Parser`."""
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[ChannelText]:
        """See `Parser`."""
        return self._forward(self._reasoning.push(text))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`."""
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


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """OpenAI's harmony messages: one format for reasoning and calls."""

    marks: frozenset[str] = Harmony.marks


ToolFormat = JsonFormat | LiteralFormat | TagFormat | HarmonyFormat
ReasoningFormat = ThinkFormat | HarmonyFormat

_SEPARATOR = "<｜tool▁sep｜>"
_CALL_ID = "[CALL_ID]"


def _after_kind(head: str) -> str:
    """Return the name in DeepSeek's ``function<sep>name`` before a code fence."""
    kind, _, name = head.partition(_SEPARATOR)
    return name.strip().rstrip("`").rstrip() if kind.strip() == "function" else ""


def _without_number(head: str) -> str:
    """Return the name in Kimi's ``functions.name:0``."""
    name, _, number = head.strip().rpartition(":")
    return (name if name and number.isdecimal() else head.strip()).removeprefix("functions.")


def _before_id(head: str) -> str:
    """Return the name in Mistral's ``name[CALL_ID]abc123456``."""
    return head.partition(_CALL_ID)[0].strip()


def _invoke_tags(prefix: str, *groups: str, within: tuple[str, ...] = ()) -> TagFormat:
    """Return Anthropic's tags with a prefix: ``<invoke name="f"><parameter name="a">``, within one of the groups."""
    return TagFormat(
        begins=tuple(f"<{group}>" for group in groups),
        function=f"<{prefix}invoke name=",
        name_end=">",
        parameter=f"<{prefix}parameter name=",
        key_end=">",
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>", *(f"</{group}>" for group in groups)),
        can_omit_begin=True,
        within=within,
    )


_THINK = ThinkFormat(("<think>",), ("</think>",))
_THINK_FIRST = ThinkFormat(("<think>",), ("</think>",), begins_inside=True)
_COHERE_BEGINS = ("<|START_RESPONSE|>", "<|START_TEXT|>")
_KIMI_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_FUNCTION_TAGS = TagFormat(
    begins=("<tool_call>",),
    function="<function=",
    name_end=">",
    parameter="<parameter=",
    key_end=">",
    value_end="</parameter>",
    ends=("</function>", "</tool_call>"),
    has_lines=True,
    can_omit_begin=True,
)
_JSON_LIST = JsonFormat(("<tool_calls>",), ("</tool_calls>",))
_LLAMA_JSON = JsonFormat(("<|python_tag|>", "<tool_call>"), ("</tool_call>",), bare=("{", "["))
_JSON_TAGS = JsonFormat(("<tool_call>", "<tools>"), ("</tool_call>", "</tools>"), strict_begins=("<tools>",))
_HERMES = replace(_JSON_TAGS, bare=(LINE,), strict_begins=("<tools>", LINE))

REASONING: dict[str, ReasoningFormat] = {
    "apertus": ThinkFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "cohere_command3": ThinkFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        breaks=_COHERE_BEGINS,
        around=(*_COHERE_BEGINS, "<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    "deepseek_r1": _THINK_FIRST,
    "deepseek_v3": _THINK,
    "ernie45": ThinkFormat(
        ("<think>",), ("</think>",), begins_inside=True, around=("<response>", "</response>")
    ),
    "gemma": ThinkFormat(("<|channel>thought",), ("<channel|>",), first=("thought\n",), is_repeated=True),
    "glm45": _THINK,
    "granite": ThinkFormat(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        around=("<response>", "</response>"),
    ),
    "hunyuan_a13b": ThinkFormat(("<think>",), ("</think>",), around=("<answer>", "</answer>")),
    "kimi": ThinkFormat(("◁think▷",), ("◁/think▷",)),
    "kimi_k2": ThinkFormat(("<think>",), ("</think>",), breaks=_KIMI_BEGINS[:1]),
    "minimax_m2": _THINK_FIRST,
    "mistral": ThinkFormat(("[THINK]",), ("[/THINK]",)),
    "nemotron_v3": _THINK_FIRST,
    "olmo3": _THINK_FIRST,
    "openai_gptoss": HarmonyFormat(),
    "qwen3": _THINK,
    "seed_oss": ThinkFormat(("<seed:think>",), ("</seed:think>",)),
    "solar_open2": ThinkFormat(("<|think:start|>",), ("<|think:end|>",)),
    "step3": _THINK_FIRST,
}

TOOLS: dict[str, ToolFormat] = {
    "apertus": JsonFormat(("<|tools_prefix|>",), ("<|tools_suffix|>",), is_keyed=True),
    "cohere_command3": JsonFormat(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    "deepseek_v3": JsonFormat(
        ("<｜tool▁call▁begin｜>",),
        (FENCE, "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        heads=("```json",),
        within=(_SEPARATOR,),
        name_of=_after_kind,
    ),
    "deepseek_v31": JsonFormat(
        ("<｜tool▁call▁begin｜>",),
        (FENCE, "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        heads=(_SEPARATOR,),
    ),
    "deepseek_v32": _invoke_tags(
        "｜DSML｜", "｜DSML｜function_calls", "｜DSML｜tool_calls", within=("｜DSML｜",)
    ),
    "dots": _invoke_tags("", "dots_function_call"),
    "gemma": LiteralFormat(
        ("<start_function_call>", "<|tool_call>"),
        ("<end_function_call>", "<tool_call|>"),
        is_bare=True,
        prefix="call:",
        openings="{(",
        notation=GEMMA,
    ),
    "gigachat3": JsonFormat(
        ("function call<|role_sep|>", "<|function_call|>"),
        around=("<|message_sep|>",),
        within=("<|role_sep|>\n", "<|message_sep|>\n\n"),
    ),
    "gigachat35": _invoke_tags("｜GCML｜", "｜GCML｜tool_calls", within=("｜GCML｜",)),
    "glm45": TagFormat(
        begins=("<tool_call>",),
        function="",
        name_end="",
        parameter="<arg_key>",
        key_end="</arg_key>",
        value_begin="<arg_value>",
        value_end="</arg_value>",
        ends=("</tool_call>",),
    ),
    "granite": JsonFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "granite_20b_fc": JsonFormat(("<function_call>",)),
    "hermes": _HERMES,
    "hunyuan_a13b": _JSON_LIST,
    "internlm": JsonFormat(("<|plugin|>",), ("<|action_end|>",), ("<|action_start|>",)),
    "jamba": _JSON_LIST,
    "kimi_k2": JsonFormat(
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        (*_KIMI_BEGINS, *_KIMI_ENDS),
        heads=("<|tool_call_argument_begin|>",),
        name_of=_without_number,
    ),
    "lfm2": LiteralFormat(("<|tool_call_start|>",), ("<|tool_call_end|>",), has_lines=True),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": LiteralFormat(("<|python_start|>",), ("<|python_end|>",), is_bare=True),
    "longcat": JsonFormat(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
    "minicpm5": TagFormat(
        begins=(),
        function="<function name=",
        name_end=">",
        parameter="<param name=",
        key_end=">",
        value_end="</param>",
        ends=("</function>",),
        can_omit_begin=True,
        quotes=("<![CDATA[", "]]>"),
        within=("<function", "<param"),
    ),
    "minimax_m2": _invoke_tags("", "minimax:tool_call"),
    "mistral": JsonFormat(
        ("[TOOL_CALLS]",), ("[/TOOL_CALLS]",), heads=("[ARGS]",), within=(_CALL_ID,), name_of=_before_id
    ),
    "nemotron_json": JsonFormat(("<TOOLCALL>",), ("</TOOLCALL>",)),
    "olmo3": LiteralFormat(("<function_calls>",), ("</function_calls>",), has_lines=True),
    "openai": HarmonyFormat(),
    "phi4_mini_json": JsonFormat(("functools", "<|tool_call|>"), ("<|/tool_call|>",), bare=(LINE,)),
    "pythonic": LiteralFormat(is_bare=True),
    "qwen3_coder": _FUNCTION_TAGS,
    "qwen3_xml": _FUNCTION_TAGS,
    "seed_oss": replace(
        _FUNCTION_TAGS, begins=("<seed:tool_call>",), ends=("</function>", "</seed:tool_call>")
    ),
    "solar_open2": TagFormat(
        begins=("<|tool_call:start|>",),
        function="",
        name_end="",
        parameter="<|tool_arg:start|>",
        key_end="<|tool_arg:value|>",
        value_end="<|tool_arg:end|>",
        ends=("<|tool_call:end|>",),
    ),
    "step3": replace(
        _invoke_tags("steptml:"),
        begins=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        ends=("</steptml:invoke>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<｜tool_sep｜>"),
        fillers=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
    ),
    "xlam": JsonFormat(("```json", "[TOOL_CALLS]", "<tool_call>"), ("```", "</tool_call>"), bare=(LINE,)),
}
"""Formats of the models' chat templates, by vLLM's or SGLang's name; ``nemotron_json`` is NVIDIA's.

Sources of the formats beyond templates: vLLM's page on tool calling (``apertus``, ``solar_open2``) and its parsers
(``minicpm5``); SGLang's parsers (``cohere_command3``, ``dots``, ``gigachat35``).
"""

SECOND: dict[str, tuple[JsonFormat | TagFormat, tuple[str, ...]]] = {
    "dots": (JsonFormat(("<dots_function_call>",), ("</dots_function_call>",)), ("{", "[")),
    "glm45": (_JSON_TAGS, ("{", "[")),
    "hermes": (_FUNCTION_TAGS, ("<function=",)),
    "lfm2": (JsonFormat(("<|tool_call_start|>",), ("<|tool_call_end|>",)), ("{", "[{")),
    "llama4_pythonic": (
        JsonFormat(("<|python_start|>",), ("<|python_end|>",), bare=(LINE,)),
        ("{", "[{"),
    ),
    "qwen3_coder": (_JSON_TAGS, ("{", "[")),
    "qwen3_xml": (_JSON_TAGS, ("{", "[")),
}
"""Formats that models write in the marks of another, and the text after a mark that begins them."""


def needs_schemas(tools: str) -> bool:
    """Return whether arguments of this format are untyped, so that the parser needs the tools' schemas."""
    return isinstance(TOOLS.get(tools), TagFormat)


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
    is_harmony = [isinstance(form, HarmonyFormat) for form in (REASONING.get(reasoning), TOOLS.get(tools))]
    return not (reasoning and tools) or is_harmony[0] == is_harmony[1]


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
    if not tools:
        assert thought is not None
        return Thinking(thought, prompt)
    form, types = TOOLS[tools], Schemas(schemas)
    calls = _calls(tools, types)
    if thought is None:
        return calls
    within = EmbeddedCalls(_begins(form), lambda: _calls(tools, types))
    return Chain(Thinking(thought, prompt, within), calls, LateCloseFilter(thought))


def _begins(form: ToolFormat) -> frozenset[str]:
    """Return the marks that begin calls or groups of calls. Calls without a mark are not detected in reasoning."""
    match form:
        case JsonFormat():
            return frozenset((*form.begins, *form.around)) - frozenset(form.ends)
        case LiteralFormat():
            return frozenset(form.begins)
        case TagFormat():
            return frozenset((*form.begins, *((form.function,) if form.can_omit_begin else ())))
        case HarmonyFormat():
            return frozenset()


def _calls(tools: str, schemas: Schemas) -> Parser:
    form = TOOLS[tools]
    if isinstance(form, HarmonyFormat):
        return Harmony(with_reasoning=False, with_calls=True)
    reader = _reader(form, schemas)
    if tools not in SECOND:
        return reader
    second, openings = SECOND[tools]
    return EitherCalls(reader, _reader(second, schemas), openings)


def _reader(form: JsonFormat | LiteralFormat | TagFormat, schemas: Schemas) -> CallReader:
    match form:
        case JsonFormat():
            return JsonCalls(form)
        case LiteralFormat():
            return LiteralCalls(form)
        case TagFormat():
            return TaggedCalls(form, schemas)
