"""Choice of the reasoning and tool call parsers: the flags', or detected from the chat template."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from quintet.deploy.config.model.chat_templates import DEFAULT
from quintet.detokenizer_proc.parsers import registry
from quintet.detokenizer_proc.parsers.choice import reasoning_by, tools_by
from quintet.detokenizer_proc.parsers.forced import forced_calls, think_marks
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import ConfigError

AUTO, NONE = "auto", "none"
TOOL_USE = "tool_use"
"""Name of the template for requests with tools, if the model has one."""


def choose_parsers(
    reasoning: str, tools: str, templates: Mapping[str, str]
) -> tuple[ParsersConfig, str | None]:
    """Resolve the two flags; also return a note if a parser was detected. Raises `ConfigError`."""
    _check("--reasoning-parser", reasoning, registry.REASONING)
    _check("--tool-call-parser", tools, registry.TOOLS)
    default = templates.get(DEFAULT, "")
    chosen = {
        "--reasoning-parser": reasoning_by(default) if reasoning == AUTO else "",
        "--tool-call-parser": tools_by(templates.get(TOOL_USE, default)) if tools == AUTO else "",
    }
    named = [
        chosen[flag] if value == AUTO else "" if value == NONE else value
        for flag, value in (("--reasoning-parser", reasoning), ("--tool-call-parser", tools))
    ]
    if not registry.fit(*named):
        raise ConfigError(
            f"--reasoning-parser {named[0] or NONE} and --tool-call-parser {named[1] or NONE} cannot be combined: "
            "openai_gptoss and openai must be used together"
        )
    config = ParsersConfig(
        reasoning=named[0],
        tools=named[1],
        needs_schemas=registry.needs_schemas(named[1]),
        call_ids=registry.call_ids(named[1]),
        thinks=think_marks(named[0]),
        forced=forced_calls(*named),
    )
    flags = " ".join(f"{flag} {name}" for flag, name in chosen.items() if name)
    return config, f"parsers detected from the chat template: {flags}" if flags else None


def _check(flag: str, name: str, known: Collection[str]) -> None:
    if name in {AUTO, NONE} or name in known:
        return
    nearest = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"{flag} is {name!r}: {hint}it must be auto, none or one of {', '.join(sorted(known))}")
