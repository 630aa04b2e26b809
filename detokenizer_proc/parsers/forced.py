"""Syntax of required tool calls per format, and the marks of reasoning, for structured output.

Formats with arguments other than JSON cannot be enforced. Their required calls use the `hermes` format and parser.
"""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.parsers.formats import REASONING, HarmonyFormat
from quintet.detokenizer_proc.parsers.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from quintet.detokenizer_proc.parsers.messages import MessageFormat
from quintet.detokenizer_proc.parsers.thinking import ThinkFormat
from quintet.wire.config import ForcedCalls, ThinkMarks

_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '


def _listed(reader: str, begin: str, end: str) -> ForcedCalls:
    return ForcedCalls(reader, _NAME, _ARGUMENTS, "}", ", ", begin, end)


_HERMES = ForcedCalls("hermes", "<tool_call>\n" + _NAME, _ARGUMENTS, "}\n</tool_call>")

FORCED: dict[str, ForcedCalls] = {
    "apertus": ForcedCalls("apertus", '{"', '": ', "}", ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
    "cohere_command3": ForcedCalls(
        "cohere_command3",
        '{"tool_call_id": "0", "tool_name": "',
        _PARAMETERS,
        "}",
        ", ",
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
    ),
    "deepseek_v3": ForcedCalls(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": ForcedCalls(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "granite": _listed("granite", "<|tool_call|>[", "]"),
    "hunyuan_a13b": _listed("hunyuan_a13b", "<tool_calls>[", "]</tool_calls>"),
    "inkling": ForcedCalls(
        "inkling",
        "<|content_invoke_tool_json|>" + _NAME,
        '", "args": ',
        "}<|end_message|>",
        "<|message_model|>",
    ),
    "internlm": ForcedCalls(
        "internlm", "<|action_start|><|plugin|>\n" + _NAME, _PARAMETERS, "}<|action_end|>"
    ),
    "jamba": _listed("jamba", "<tool_calls>[", "]</tool_calls>"),
    "kimi_k2": ForcedCalls(
        "kimi_k2",
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "llama3_json": ForcedCalls("llama3_json", _NAME, _PARAMETERS, "}", "; "),
    "llama4_json": ForcedCalls("llama4_json", _NAME, _PARAMETERS, "}", "; "),
    "mistral": _listed("mistral", "[TOOL_CALLS][", "]"),
    "muse_glimmer": ForcedCalls(
        "muse_glimmer",
        '<atem:invoke name="',
        '">',
        "</atem:invoke>",
        "",
        "<|start|>assistant to=tool<|message|><atem:function_calls>",
        "</atem:function_calls>",
    ),
    "nemotron_json": _listed("nemotron_json", "<TOOLCALL>[", "]</TOOLCALL>"),
    "openai": ForcedCalls(
        "openai",
        f"{CHANNEL}commentary to=functions.",
        f" {CONSTRAIN}json{MESSAGE}",
        "",
        is_single=True,
    ),
    "phi4_mini_json": _listed("phi4_mini_json", "functools[", "]"),
    "xlam": _listed("xlam", "[", "]"),
}


def forced_calls(reasoning: str, tools: str) -> ForcedCalls:
    """Return the syntax of required calls for a model with these parsers (empty: none)."""
    form = REASONING.get(reasoning)
    if isinstance(form, HarmonyFormat):
        return FORCED["openai"]
    return FORCED.get(reasoning if isinstance(form, MessageFormat) else tools, _HERMES)


def think_marks(reasoning: str, calls: Iterable[str] = ()) -> ThinkMarks | None:
    """Return the marks around reasoning of this format; None without a reasoning parser. ``calls``: marks of tool calls."""
    form = REASONING.get(reasoning)
    if form is None:
        return None
    if isinstance(form, ThinkFormat):
        # A tool call ends reasoning. Marks that are words, such as functools, also occur in reasoning.
        breaks = [*form.breaks, *sorted(mark for mark in calls if mark.startswith(("<", "[", "]")))]
        return ThinkMarks(list(form.opens), list(form.closes), form.begins_inside, breaks=breaks)
    if isinstance(form, MessageFormat):
        return ThinkMarks([form.reasoning], [form.ends[0]], answer=form.answer)
    analysis, final = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
    return ThinkMarks([analysis], [f"{ENDS[0]}{START}assistant"], answer=final, breaks=[*ENDS, START])
