"""Choice of the reasoning and tool call parsers: the flags', or detected from the chat template."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

import msgspec

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.chat_templates import DEFAULT
from quintet.detokenizer_proc.parsers import registry
from quintet.detokenizer_proc.parsers.choice import reasoning_by, tools_by
from quintet.detokenizer_proc.parsers.forced import forced_calls, think_marks
from quintet.detokenizer_proc.parsers.formats import REASONING, TOOLS
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import ConfigError

AUTO, NONE = "auto", "none"
TOOL_ALIASES = {
    "apertus2509": "apertus",
    "cohere_command4": "cohere_command3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "ernie45": "hermes",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt_oss": "openai",
    "hunyuan": "hy_v3",
    "hy_v4": "hy_v3",
    "granite4": "granite",
    "interns1": "internlm",
    "ling3": "glm45",
    "llama3": "llama3_json",
    "llama_nemotron_json": "nemotron_json",
    "mimo": "qwen3_coder",
    "minimax": "jamba",
    "muse": "muse_glimmer",
    "poolside_v1": "glm45",
    "qwen": "hermes",
    "qwen25": "hermes",
    "spark25": "glm45",
    "step3p5": "qwen3_coder",
    "trinity": "hermes",
}
"""Names of vLLM and SGLang for formats that have another name here, with ``_`` for ``-``."""
REASONING_ALIASES = {
    "apertus2509": "apertus",
    "cohere_command4": "cohere_command3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v3",
    "deepseek_v41": "deepseek_v3",
    "gemma4": "gemma",
    "glm47": "glm45",
    "gpt_oss": "openai_gptoss",
    "gptoss": "openai_gptoss",
    "holo2": "deepseek_r1",
    "hunyuan": "hunyuan_a13b",
    "hy_v4": "hy_v3",
    "identity": NONE,
    "interns1": "qwen3",
    "ling3": "glm45",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2_append_think",
    "mimo": "qwen3",
    "nano_v3": "nemotron_v3",
    "nemotron_3": "nemotron_v3",
    "poolside_v1": "qwen3",
    "qwen3_thinking": "deepseek_r1",
    "step3p5": "step3",
    "telechat4": "qwen3",
}
"""The same for reasoning."""
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, if the model has one."""


def choose_parsers(
    reasoning: str, tools: str, templates: Mapping[str, str]
) -> tuple[ParsersConfig, str | None]:
    """Resolve the two flags; also return a note if a parser was detected. Raises `ConfigError`."""
    reasoning = _resolved("--reasoning-parser", reasoning, REASONING, REASONING_ALIASES)
    tools = _resolved("--tool-call-parser", tools, TOOLS, TOOL_ALIASES)
    default = templates.get(DEFAULT, "")
    chosen = {
        "--reasoning-parser": (reasoning_by(default) or reasoning_by(templates.get(TOOL_USE, "")))
        if reasoning == AUTO
        else "",
        "--tool-call-parser": tools_by(templates.get(TOOL_USE, default)) if tools == AUTO else "",
    }
    named = [
        chosen[flag] if value == AUTO else "" if value == NONE else value
        for flag, value in (("--reasoning-parser", reasoning), ("--tool-call-parser", tools))
    ]
    if not registry.fit(*named):
        raise ConfigError(
            f"--reasoning-parser {named[0] or NONE} and --tool-call-parser {named[1] or NONE} cannot be combined: "
            "openai_gptoss and openai, inkling and muse_glimmer must be used together, or with none"
        )
    config = ParsersConfig(
        reasoning=named[0],
        tools=named[1],
        needs_schemas=registry.needs_schemas(named[1]),
        call_ids=registry.call_ids(named[1]),
        thinks=think_marks(named[0], registry.call_marks(named[1])),
        forced=forced_calls(*named),
    )
    flags = " ".join(f"{flag} {name}" for flag, name in chosen.items() if name)
    return config, f"parsers detected from the chat template: {flags}" if flags else None


def reasoning_parser(options: Options) -> str:
    """Return the named reasoning parser: that of ``--reasoning-parser``, else that of ``--reasoning-config``."""
    named = options.reasoning_config.get("reasoning_parser")
    return str(named) if named and options.reasoning_parser == AUTO else options.reasoning_parser


def with_ending(
    parsers: ParsersConfig, reasoning_config: Mapping[str, object]
) -> tuple[ParsersConfig, str | None]:
    """Add the text before the closing mark in ``reasoning_end_str``; return a note if it has no such mark."""
    text, thinks = str(reasoning_config.get("reasoning_end_str") or ""), parsers.thinks
    if not text or thinks is None:
        return parsers, None
    for mark in thinks.closes:
        ending, found, _ = text.partition(mark)
        if found:
            return msgspec.structs.replace(
                parsers, thinks=msgspec.structs.replace(thinks, ending=ending)
            ), None
    return (
        parsers,
        f"--reasoning-config: reasoning_end_str {text!r} has no effect: it has no {' or '.join(thinks.closes)}",
    )


def _resolved(flag: str, name: str, known: Collection[str], aliases: Mapping[str, str]) -> str:
    """Return the parser's name here; an empty name is `NONE`. Raises `ConfigError` for an unknown one."""
    if not name:
        return NONE
    plain = name.replace("-", "_").lower()
    for each in (name, plain, aliases.get(plain, "")):
        if each in {AUTO, NONE} or each in known:
            return each
    nearest = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"{flag} is {name!r}: {hint}it must be auto, none or one of {', '.join(sorted(known))}")
