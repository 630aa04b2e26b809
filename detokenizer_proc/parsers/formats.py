"""Formats of reasoning and of tool calls, by the names of their parsers.

A format of a known shape is one entry. A new shape needs a module in this folder and a case in `registry`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quintet.detokenizer_proc.parsers.harmony import Harmony
from quintet.detokenizer_proc.parsers.json_calls import JsonFormat
from quintet.detokenizer_proc.parsers.literal_calls import LiteralFormat
from quintet.detokenizer_proc.parsers.literals import GEMMA
from quintet.detokenizer_proc.parsers.machine import FENCE, LINE
from quintet.detokenizer_proc.parsers.messages import MessageFormat
from quintet.detokenizer_proc.parsers.nested_calls import NestedFormat
from quintet.detokenizer_proc.parsers.tag_format import TagFormat, attribute, key_attributes, key_before_type
from quintet.detokenizer_proc.parsers.thinking import ThinkFormat


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """OpenAI's harmony messages: one format for reasoning and calls."""

    marks: frozenset[str] = Harmony.marks


@dataclass(frozen=True, slots=True)
class MessageCalls:
    """Calls inside messages, in another format."""

    messages: MessageFormat
    calls: JsonFormat | TagFormat

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see as text."""
        return self.messages.marks | self.calls.marks


ToolFormat = JsonFormat | LiteralFormat | TagFormat | NestedFormat | HarmonyFormat | MessageCalls
ReasoningFormat = ThinkFormat | HarmonyFormat | MessageFormat

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


def _is_inkling_header(text: str) -> bool:
    """Return whether a text may be the name before Inkling's mark of a message's type."""
    return all(sign.isalnum() or sign in "_.-" for sign in text.strip())


def _is_muse_header(text: str) -> bool:
    """Return whether a text may be, or begin, Muse Glimmer's ``assistant to=name``."""
    return all(
        "assistant".startswith(word) or word.startswith("to=") or "to=".startswith(word)
        for word in text.split()
    )


_INKLING = MessageFormat(
    start="<|message_model|>",
    bodies=(
        "<|content_thinking|>",
        "<|content_text|>",
        "<|content_invoke_tool_json|>",
        "<|content_invoke_tool_text|>",
        "<|content_tool_error|>",
    ),
    ends=("<|end_message|>", "<|content_model_end_sampling|>"),
    reasoning="<|content_thinking|>",
    answer="<|message_model|><|content_text|>",
    is_header=_is_inkling_header,
    call_mark="<|content_invoke_tool_json|>",
)
_MUSE = MessageFormat(
    start="<|start|>",
    bodies=("<|message|>",),
    ends=("<|eom|>", "<|eot|>"),
    reasoning="to=self<|message|>",
    answer="<|start|>assistant to=user<|message|>",
    is_header=_is_muse_header,
)
_HUNYUAN_SPELLINGS = tuple(
    (f"<{slash}{name}:opensource>", f"<{slash}{name}>")
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    for slash in ("", "/")
)
_DSML_GROUPS = ("tool_calls", "function_calls", "calls", "toolcalls")
_DSML_SPELLINGS = tuple(
    (f"<{slash}{bar}DSML{bar}{space}{name}", f"<{slash}｜DSML｜{name}")
    for bar in ("｜", "｜｜", "|", "‖")
    for space in ("", " ")
    for slash in ("", "/")
    for name in ("invoke", "parameter", *_DSML_GROUPS)
    if (bar, space) != ("｜", "")
)
"""Those of V4.1, with a space, and of models that write the marks without their special token."""
_THINK = ThinkFormat(("<think>",), ("</think>",))
_THINK_FIRST = replace(_THINK, begins_inside=True)
_COHERE_BEGINS = ("<|START_RESPONSE|>", "<|START_TEXT|>")
_KIMI_BEGINS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_K3_ANSWER = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
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
_KEY_VALUE_TAGS = TagFormat(
    begins=("<tool_call>",),
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    ends=("</tool_call>",),
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
    "ernie45": replace(_THINK_FIRST, around=("<response>", "</response>")),
    "gemma": ThinkFormat(("<|channel>thought",), ("<channel|>",), first=("thought\n",), is_repeated=True),
    "glm45": _THINK,
    "granite": ThinkFormat(
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        around=("<response>", "</response>"),
    ),
    "hunyuan_a13b": replace(_THINK, around=("<answer>", "</answer>")),
    "hy_v3": ThinkFormat(("<think>", "<think:opensource>"), ("</think>", "</think:opensource>")),
    "inkling": _INKLING,
    "k2_horizon": ThinkFormat(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        breaks=("<ifm|tool_calls>",),
    ),
    "kimi": ThinkFormat(("◁think▷",), ("◁/think▷",)),
    "kimi_k2": replace(_THINK, breaks=_KIMI_BEGINS[:1]),
    "kimi_k3": ThinkFormat(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        breaks=(_K3_ANSWER[0], "<|open|>tools<|sep|>"),
        around=_K3_ANSWER,
        within=_K3_TOKENS,
    ),
    "minimax_m2": _THINK_FIRST,
    "minimax_m2_append_think": replace(_THINK_FIRST, is_kept=True),
    "minimax_m3": ThinkFormat(("<mm:think>",), ("</mm:think>",)),
    "mistral": ThinkFormat(("[THINK]",), ("[/THINK]",)),
    "muse_glimmer": _MUSE,
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
    "deepseek_v32": replace(
        _invoke_tags("｜DSML｜", *(f"｜DSML｜{name}" for name in _DSML_GROUPS), within=("｜DSML｜",)),
        spellings=_DSML_SPELLINGS,
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
    "glm45": _KEY_VALUE_TAGS,
    "granite": JsonFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "granite_20b_fc": JsonFormat(("<function_call>",)),
    "hermes": _HERMES,
    "hunyuan_a13b": _JSON_LIST,
    "hy_v3": replace(
        _KEY_VALUE_TAGS,
        ends=("</tool_call>", "</tool_calls>"),
        fillers=("<tool_sep>",),
        around=("<tool_calls>",),
        spellings=_HUNYUAN_SPELLINGS,
    ),
    "inkling": MessageCalls(_INKLING, JsonFormat((_INKLING.call_mark,), argument_key="args")),
    "internlm": JsonFormat(("<|plugin|>",), ("<|action_end|>",), ("<|action_start|>",)),
    "jamba": _JSON_LIST,
    "k2_horizon": TagFormat(
        begins=("<ifm|tool_call>",),
        parameter="<ifm|arg_key>",
        key_end="<ifm|arg_value>",
        value_end="</ifm|arg_value>",
        ends=("</ifm|tool_call>", "</ifm|tool_calls>"),
        around=("<ifm|tool_calls>",),
        within=("</ifm|arg_key>", "<ifm|arg_type>", "</ifm|arg_type>"),
        key_of=key_before_type,
    ),
    "kimi_k2": JsonFormat(
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        (*_KIMI_BEGINS, *_KIMI_ENDS),
        heads=("<|tool_call_argument_begin|>",),
        name_of=_without_number,
    ),
    "kimi_k3": TagFormat(
        begins=("<|open|>tools<|sep|>",),
        function="<|open|>call ",
        name_end="<|sep|>",
        parameter="<|open|>argument ",
        key_end="<|sep|>",
        value_end="<|close|>argument<|sep|>",
        ends=("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>json<|sep|>"),
        can_omit_begin=True,
        fillers=('<|open|>json type="object"<|sep|>',),
        within=_K3_TOKENS,
        name_of=lambda text: attribute(text, "tool"),
        key_of=key_attributes,
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
    "minimax_m3": NestedFormat("]<]minimax[>["),
    "mistral": JsonFormat(
        ("[TOOL_CALLS]",), ("[/TOOL_CALLS]",), heads=("[ARGS]",), within=(_CALL_ID,), name_of=_before_id
    ),
    "muse_glimmer": MessageCalls(_MUSE, _invoke_tags("atem:", "atem:function_calls")),
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
    "k2_horizon": (JsonFormat(("<ifm|tool_call>",), ("</ifm|tool_call>", "</ifm|tool_calls>")), ("{", "[")),
    "lfm2": (JsonFormat(("<|tool_call_start|>",), ("<|tool_call_end|>",)), ("{", "[{")),
    "llama4_pythonic": (
        JsonFormat(("<|python_start|>",), ("<|python_end|>",), bare=(LINE,)),
        ("{", "[{"),
    ),
    "qwen3_coder": (_JSON_TAGS, ("{", "[")),
    "qwen3_xml": (_JSON_TAGS, ("{", "[")),
}
"""Formats that models write in the marks of another, and the text after a mark that begins them."""
