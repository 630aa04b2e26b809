"""Flag table derived from `Options`: declares command-line arguments, reads YAML files, and validates names and types."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from quintet.deploy.config.deprecated_flags import RENAMED_VALUES, warn, with_new_names
from quintet.deploy.config.flag import FLAG, Flag, boolean, count, option
from quintet.deploy.config.flags import Options
from quintet.deploy.config.sglang_flags import flag_for
from quintet.deploy.config.vllm_flags import ROPE, SHORT
from quintet.deploy.config.vllm_settings import translated
from quintet.wire.errors import ConfigError

NETWORK = "network and API"
FLAG_GROUPS = {
    "model": "model and tokenizer",
    "host": NETWORK,
    "max_num_seqs": "scheduling",
    "kv_cache_memory": "KV cache",
    "executor": "device",
    "frontends": "processes",
}
"""First flag of each group in `Options` -> title of the group."""
_NUMBERS: dict[type, re.Pattern[str]] = {
    int: re.compile(r"-?\d{1,15}"),
    float: re.compile(r"-?\d{1,15}(\.\d{0,15})?|\.\d{1,15}"),
}
"""Numbers given as text, as from a hidden alias of a flag, or quoted in a YAML file."""

USED_FIRST = (
    *("host", "port", "api_key", "served_model_name", "max_model_len", "max_num_seqs"),
    *("kv_cache_memory", "dtype", "quantization", "tensor_parallel_size"),
)
"""The most used flags, listed first in the help."""


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One row of the table: a field of `Options`."""

    key: str
    """Name in Python and YAML: ``max_model_len``."""
    kind: type[int] | type[float] | type[str] | type[bool]
    """Type of one command-line value. Sizes stay text; `memory.parse_size` reads them."""
    choices: tuple[str, ...] | None
    repeated: bool
    default: object
    flag: Flag
    group: str
    """Title."""

    @property
    def option(self) -> str:
        """The command-line spelling: ``--max-model-len``."""
        return option(self.key)


@functools.cache
def flag_table() -> list[FlagSpec]:
    """Return every flag, in the order of `Options`."""
    hints = typing.get_type_hints(Options)
    table, group = [], ""
    for field in fields(Options):
        group = FLAG_GROUPS.get(field.name, group)
        annotated, flag = hints[field.name], field.metadata[FLAG]
        default = [] if field.default is MISSING else field.default
        origin, members = typing.get_origin(annotated), typing.get_args(annotated)
        kinds = [each for each in members or (annotated,) if each is not type(None)]
        is_text = flag.read is not None or origin in (Literal, list) or str in kinds
        choices = members if origin is Literal else None
        spec = FlagSpec(
            field.name, str if is_text else kinds[0], choices, origin is list, default, flag, group
        )
        table.append(spec)
    return table


def add_flags(parser: argparse.ArgumentParser, without: str | None = None) -> None:
    """Declare the flags on a parser, group by group; absent flags add nothing to the namespace.

    ``model`` is a positional argument of the commands, not a flag. A command with all groups shows `USED_FIRST` first.
    without: title of a group that is left out.
    """
    table = {spec.key: spec for spec in flag_table()}
    short = {key: word for word, key in SHORT.items()}
    del table["model"]

    def add(section: argparse._ArgumentGroup, spec: FlagSpec) -> None:
        _add_flag(section, spec, [short[spec.key]] if spec.key in short else [])

    if without is None:
        section = parser.add_argument_group("most used")
        for key in USED_FIRST:
            add(section, table.pop(key))
    for group in FLAG_GROUPS.values():
        if group != without:
            section = parser.add_argument_group(group)
            for spec in table.values():
                if spec.group == group:
                    add(section, spec)


def _add_flag(section: argparse._ArgumentGroup, spec: FlagSpec, short: list[str]) -> None:
    text = f"{spec.flag.help} (default: {_default_text(spec)})".replace("%", "%%")
    if spec.kind is bool:
        section.add_argument(
            *short, spec.option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    elif spec.repeated:
        several: dict[str, Any] = (
            {"action": "extend", "nargs": "+"} if spec.flag.takes_several else {"action": "append"}
        )
        section.add_argument(
            spec.option, metavar=spec.flag.metavar, default=argparse.SUPPRESS, help=text, **several
        )
    elif spec.choices:
        section.add_argument(
            *short, spec.option, choices=spec.choices, type=_choice_reader(spec), default=argparse.SUPPRESS, help=text,
        )  # fmt: skip
    else:
        section.add_argument(
            *short,
            spec.option,
            type=spec.kind,
            metavar=spec.flag.metavar or ("N" if spec.kind is int else spec.key.rpartition("_")[2].upper()),
            default=argparse.SUPPRESS,
            help=text,
        )


def _choice_reader(spec: FlagSpec) -> typing.Callable[[str], str]:
    """Return a parser of choices: case-insensitive, with aliases and deprecated values."""
    by_lower = {**spec.flag.aliases, **{choice.lower(): choice for choice in spec.choices or ()}}
    deprecated = RENAMED_VALUES.get(spec.key, {})

    def read(word: str) -> str:
        if word in deprecated:
            warn(f"{spec.option} {word}", f"{spec.option} {deprecated[word]}")
            return deprecated[word]
        return by_lower.get(word.lower(), word)

    return read


def _default_text(spec: FlagSpec) -> str:
    if spec.flag.default_text is not None:
        return spec.flag.default_text
    if spec.kind is bool:
        return "on" if spec.default else "off"
    return str(spec.default)


def make_options(settings: Mapping[str, object], source: str) -> Options:
    """Validate names and types of settings and return them as `Options`. Raises `ConfigError`.

    ``source`` names the origin of the settings in error messages: a file name, ``LLM(...)``, ``the command line``.
    Keys may have dashes or underscores. The error for an unknown key suggests the nearest valid one.
    """
    known = {spec.key: spec for spec in flag_table()}
    values: dict[str, object] = {}
    for raw_key, value in translated(with_new_names(settings), source)[0].items():
        key = str(raw_key).replace("-", "_")
        if key not in known:
            switch = known.get(key.removeprefix("no_"))
            if switch is not None and switch.kind is bool:
                raise ConfigError(f"{source}: {key} is {value!r}, which is not true or false")
            raise ConfigError(f"{source}: unknown key {str(raw_key)!r}{_nearest(key, list(known))}")
        values[key] = _value(known[key], value)
    try:
        return msgspec.convert(values, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_reworded(str(error), values)}") from None


def _value(spec: FlagSpec, value: object) -> object:
    """Convert a given value to the field's type. Raises `ConfigError`."""
    if spec.flag.read is not None:
        return spec.flag.read(value, spec.option)
    if spec.kind is bool:
        return boolean(value)
    if spec.repeated and isinstance(value, str | dict | list):
        items = value if isinstance(value, list) else [value]
        return [json.dumps(each) if isinstance(each, dict) else each for each in items]
    if isinstance(value, dict) and spec.kind is str:
        return json.dumps(value)
    if isinstance(value, str) and spec.kind in _NUMBERS and _NUMBERS[spec.kind].fullmatch(value):
        return spec.kind(value)
    return spec.flag.aliases.get(str(value), value)  # str() of torch.bfloat16 in a call of LLM


def _nearest(key: str, known: list[str]) -> str:
    flag = flag_for(key)
    if flag is not None:
        return f"; did you mean {flag}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `quintet serve --help` lists the valid ones"


def _reworded(message: str, values: Mapping[str, object]) -> str:
    """Turn msgspec's ``Expected `int`, got `str` - at `$.port` `` into the key, its value and the allowed ones."""
    problem, _, path = message.partition(" - at `$.")
    key = path.rstrip("`").split("[")[0]
    if key not in values:
        return message
    sent = values[key]
    allowed = next((spec.choices for spec in flag_table() if spec.key == key), None)
    expected = (
        f"one of {', '.join(allowed)}" if allowed else problem.removeprefix("Expected ").split(", got")[0]
    )
    return f"{key} is {sent!r}, which is not {expected.replace('`', '').replace('bool', 'true or false')}"


def read_config_file(path: Path) -> dict[str, object]:
    """Read a YAML mapping of flag names to values, and validate names and types.

    Names may have dashes or underscores. Raises `ConfigError` with the file and the key.
    """
    import yaml  # slow to import, and rarely needed

    try:
        loaded: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {where}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"--config {path} must be a mapping like `port: 8000`, not a {type(loaded).__name__}"
        )
    settings = with_new_names(loaded)
    make_options(settings, str(path))
    return {str(key).replace("-", "_"): value for key, value in settings.items()}


def merged_options(
    config_file: Path | None, flags: dict[str, object], source: str = "the command line"
) -> tuple[Options, list[str]]:
    """Return the options of a file overridden by flags, and notes on ignored or derived settings."""
    settings_of_file = {} if config_file is None else read_config_file(config_file)
    # RoPE settings become part of the flag --hf-overrides, if there is one.
    rope = {key: value for key, value in settings_of_file.items() if key in ROPE}
    others = {key: value for key, value in settings_of_file.items() if key not in ROPE}
    in_file, notes = translated(others, str(config_file))
    given, more_notes = translated({**in_file, **rope, **with_new_names(flags)}, source)
    settings, derived_notes = derive_max_num_seqs(given)
    return make_options(settings, source), [*dict.fromkeys([*notes, *more_notes]), *derived_notes]


def derive_max_num_seqs(settings: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Limit an unset ``max_num_seqs`` to the step's token budget; return the settings and notes for the startup log.

    Takes settings rather than `Options`, which do not distinguish unset values from defaults.
    """
    named = {str(key).replace("-", "_"): value for key, value in settings.items() if value is not None}
    budget = count(named.get("max_num_batched_tokens"), "--max-num-batched-tokens")
    if "max_num_seqs" in named or type(budget) is not int or not 1 <= budget < Options().max_num_seqs:
        return dict(settings), []
    note = f"max_num_seqs is {budget}, not {Options().max_num_seqs}: --max-num-batched-tokens {budget} has one token for each"
    return {**settings, "max_num_seqs": budget}, [note]
