"""Writers of tool calls in the format of each parser, for tests that parse them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
M3 = "]<]minimax[>["
"""MiniMax M3's mark before each tag."""


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def described(call: Call, key: str = "arguments") -> str:
    return dumps({"name": call[0], key: call[1]})


def listed(calls: Sequence[Call], key: str = "arguments") -> str:
    return "[" + ", ".join(described(call, key) for call in calls) + "]"


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{described(call)}\n</tool_call>" for call in calls)


def written_as_python(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def python(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(written_as_python, calls))}]"


def python_lines(calls: Sequence[Call]) -> str:
    return "\n".join(map(written_as_python, calls))


def gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case list():
            return "[" + ",".join(gemma_value(part, quote) for part in value) + "]"
        case dict():
            return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value)


def gemma(calls: Sequence[Call]) -> str:
    quote = "<escape>"
    return "".join(
        f"<start_function_call>call:{name}{gemma_value(arguments, quote)}<end_function_call>"
        for name, arguments in calls
    )


def gemma4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(arguments, quote)}<tool_call|>" for name, arguments in calls
    )


def plain(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def function_tags(outer: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        written = []
        for name, arguments in calls:
            parameters = "".join(
                f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
            )
            written.append(f"<{outer}>\n<function={name}>\n{parameters}</function>\n</{outer}>")
        return "\n".join(written)

    return write


def glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def minimax(calls: Sequence[Call], group: str = "minimax:tool_call") -> str:
    invoked = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<{group}>\n{invoked}\n</{group}>"


def minicpm(calls: Sequence[Call]) -> str:
    def value(written: str) -> str:
        return f"<![CDATA[{written}]]>" if {"<", "&", "\n", " "} & set(written) else written

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{k}">{value(plain(v))}</param>' for k, v in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def solar(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<|tool_call:start|>{name}\n"
        + "".join(
            f"<|tool_arg:start|>{k}<|tool_arg:value|>{plain(v)}<|tool_arg:end|>\n"
            for k, v in arguments.items()
        )
        + "<|tool_call:end|>"
        for name, arguments in calls
    )


def hunyuan(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<tool_call>{name}<tool_sep>\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )
    return f"<tool_calls>\n{inner}\n</tool_calls>"


def with_hunyuan_suffix(text: str) -> str:
    return re.sub(r"<(/?(?:tool_calls?|tool_sep|arg_key|arg_value|think))>", r"<\1:opensource>", text)


def horizon(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<ifm|tool_call>{name}\n"
        + "".join(
            f"<ifm|arg_key>{k}</ifm|arg_key>\n<ifm|arg_type>{type_name(v)}</ifm|arg_type>\n"
            f"<ifm|arg_value>{plain(v)}</ifm|arg_value>\n"
            for k, v in arguments.items()
        )
        + "</ifm|tool_call>\n"
        for name, arguments in calls
    )
    return f"<ifm|tool_calls>\n{inner}</ifm|tool_calls>"


def type_name(value: object) -> str:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return types.get(type(value), "null")


def kimi_k3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{k}" type="{type_name(v)}"<|sep|>{plain(v)}<|close|>argument<|sep|>'
            for k, v in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for number, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def minimax_m3_tags(values: dict[str, Any]) -> str:
    return "".join(f"{M3}<{k}>{minimax_m3_value(v)}{M3}</{k}>" for k, v in values.items())


def minimax_m3_value(value: object) -> str:
    if isinstance(value, dict) and has_plain_text(value):
        return minimax_m3_tags(value)
    if isinstance(value, list) and has_plain_text(value):
        return "".join(f"{M3}<item>{minimax_m3_value(part)}{M3}</item>" for part in value)
    return plain(value)


def has_plain_text(value: object) -> bool:
    """Return whether all nested texts are no JSON, so that a reader without their types can convert them."""
    if isinstance(value, dict | list):
        return bool(value) and all(map(has_plain_text, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, str) or not (
        value.strip() in {"true", "12"} or value[:1] in {"{", "["} or not value
    )


def minimax_m3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'{M3}<invoke name="{name}">{minimax_m3_tags(arguments)}{M3}</invoke>\n' for name, arguments in calls
    )
    return f"{M3}<tool_call>\n{inner}{M3}</tool_call>"


def inkling(calls: Sequence[Call]) -> str:
    return "".join(
        f'<|message_model|><|content_invoke_tool_json|>{{"name": "{name}", "args": {dumps(arguments)}}}<|end_message|>'
        for name, arguments in calls
    )


def muse(calls: Sequence[Call]) -> str:
    inner = minimax(calls, "function_calls")
    tagged = re.sub(r"<(/?)(function_calls|invoke|parameter)\b", r"<\1atem:\2", inner)
    return f"<|start|>assistant to=tool<|message|>{tagged}<|eot|>"


def cohere(calls: Sequence[Call]) -> str:
    actions = [
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {dumps(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(actions) + "\n]<|END_ACTION|>"


def step3(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
        + "".join(
            f'<steptml:parameter name="{k}">{plain(v)}</steptml:parameter>\n' for k, v in arguments.items()
        )
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    invoked = "\n".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{plain(v)}</｜DSML｜parameter>\n'
            for k, v in arguments.items()
        )
        + "</｜DSML｜invoke>"
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{invoked}\n</｜DSML｜function_calls>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


WRITERS: dict[str, list[Callable[[Sequence[Call]], str]]] = {
    "apertus": [
        lambda calls: (
            f"<|tools_prefix|>{dumps([{name: arguments} for name, arguments in calls])}<|tools_suffix|>"
        )
    ],
    "cohere_command3": [cohere],
    "deepseek_v3": [deepseek_v3],
    "deepseek_v31": [deepseek_v31],
    "deepseek_v32": [
        deepseek_v32,
        lambda calls: deepseek_v32(calls).replace("function_calls", "tool_calls"),
    ],
    "dots": [
        lambda calls: minimax(calls, "dots_function_call"),
        lambda calls: hermes(calls).replace("tool_call", "dots_function_call"),
    ],
    "gemma": [gemma, gemma4],
    "gigachat3": [
        lambda calls: "".join(
            f"<|message_sep|>\n\nfunction call<|role_sep|>\n{described(call)}" for call in calls
        ),
        lambda calls: "".join(f"<|function_call|>{described(call)}" for call in calls),
    ],
    "gigachat35": [
        lambda calls: deepseek_v32(calls).replace("DSML", "GCML").replace("function_calls", "tool_calls")
    ],
    "glm45": [glm],
    "granite": [lambda calls: "<|tool_call|>" + listed(calls), hermes],
    "granite_20b_fc": [lambda calls: "\n".join(f"<function_call> {described(call)}" for call in calls)],
    "hermes": [hermes],
    "hunyuan_a13b": [lambda calls: f"<tool_calls>\n{listed(calls)}\n</tool_calls>"],
    "hy_v3": [hunyuan, lambda calls: with_hunyuan_suffix(hunyuan(calls))],
    "inkling": [inkling],
    "internlm": [
        lambda calls: "".join(
            f"<|action_start|><|plugin|>\n{described(call, 'parameters')}<|action_end|>\n" for call in calls
        )
    ],
    "jamba": [
        lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>",
        lambda calls: "<tool_calls>\n" + "".join(f"{described(call)}\n" for call in calls) + "</tool_calls>",
    ],
    "k2_horizon": [
        horizon,
        lambda calls: (
            "<ifm|tool_calls>\n" + hermes(calls).replace("tool_call>", "ifm|tool_call>") + "</ifm|tool_calls>"
        ),
    ],
    "kimi_k2": [kimi],
    "kimi_k3": [kimi_k3],
    "lfm2": [
        lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>",
        lambda calls: f"<|tool_call_start|>\n```python\n{python_lines(calls)}\n```\n<|tool_call_end|>",
    ],
    "llama3_json": [
        lambda calls: "\n" + "; ".join(described(call, "parameters") for call in calls),
        lambda calls: "<|python_tag|>" + ";".join(described(call, "parameters") for call in calls),
    ],
    "llama4_json": [lambda calls: "\n" + ";".join(described(call, "parameters") for call in calls)],
    "llama4_pythonic": [
        lambda calls: "\n" + python(calls),
        lambda calls: f"<|python_start|>{python(calls)}<|python_end|>",
    ],
    "longcat": [lambda calls: hermes(calls).replace("tool_call", "longcat_tool_call")],
    "minicpm5": [minicpm],
    "minimax_m2": [minimax],
    "minimax_m3": [minimax_m3],
    "mistral": [lambda calls: "[TOOL_CALLS]" + listed(calls), mistral_named],
    "muse_glimmer": [muse],
    "nemotron_json": [lambda calls: f"<TOOLCALL>{listed(calls)}</TOOLCALL>"],
    "olmo3": [lambda calls: f"<function_calls>{python_lines(calls)}</function_calls>"],
    "openai": [harmony],
    "phi4_mini_json": [
        lambda calls: "functools" + listed(calls),
        lambda calls: f"<|tool_call|>{listed(calls)}<|/tool_call|>",
    ],
    "pythonic": [lambda calls: "\n" + python(calls)],
    "qwen3_coder": [function_tags("tool_call")],
    "qwen3_xml": [function_tags("tool_call")],
    "seed_oss": [function_tags("seed:tool_call")],
    "solar_open2": [solar],
    "step3": [step3],
    "xlam": [
        lambda calls: "\n" + listed(calls),
        lambda calls: f"\n```json\n{listed(calls)}\n```",
        hermes,
    ],
}
