"""Spellings of flags in vLLM command lines, rewritten to those that the command's parser declares.

Underscores in names, abbreviations, switches with a value (``--enforce-eager=true``), JSON values by dotted key
(``--speculative-config.method ngram``), lists of numbers in several words, and a flag with its value in one word.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.deploy.config.flag import BOOLEANS, count

Actions = Mapping[str, argparse.Action]

NUMBER_LISTS = (
    "--cudagraph-capture-sizes",
    "--cuda-graph-sizes",
    "--numa-bind-nodes",
    "--numa-bind-cpus",
    "--kv-cache-dtype-skip-layers",
)
"""Flags of vLLM with several numbers or ranges, which have no effect here or are rejected."""
_NUMBERS = re.compile(r"\d[\d,-]*")
_WITH_UNIT = re.compile(r"\d+[kKmMgGtT]")


def declared_words(words: Sequence[str], actions: Actions) -> list[str]:
    """Return the command line in the declared spelling. ``actions``: the parser's, by option string."""
    found: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if word == "--":
            found += [word, *reversed(waiting)]
            break
        flag, blank, text = word.partition(" ")
        if blank and flag.startswith("--") and (option := _declared(flag, actions)) is not None:
            # one element of a list in a compose file: `- --dtype auto`
            text = text.strip()
            values = text.split() if actions[option].nargs == "+" else [text] * bool(text)
            waiting += [*reversed(values), flag]
            continue
        name, equals, value = word.partition("=")
        base, dot, path = name.partition(".")
        option = _declared(name, actions)
        if not word.startswith("-") or (option is None and not dot):
            found.append(word)
        elif option is not None:
            found += _words_of(option, actions[option], equals + value, waiting)
        elif (option := _declared(base, actions)) is not None:
            value = value if equals else waiting.pop() if waiting else ""
            _put(nested.setdefault(_long(option, actions), {}), path.split("."), value)
        else:
            found.append(word)
    return _with_nested(found, nested, actions)


def _long(option: str, actions: Actions) -> str:
    names = actions[option].option_strings if option in actions else [option]
    return next((each for each in names if each.startswith("--")), option)


def _declared(name: str, actions: Actions) -> str | None:
    """Return the declared spelling of a flag's name or abbreviation; None for an unknown or ambiguous one."""
    spelled = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    for each in (name, spelled):
        if each in actions:
            return each
    longer = [each for each in actions if each.startswith(spelled)] if len(spelled) > len("--") else []
    return longer[0] if len(longer) == 1 and spelled.startswith("--") else None


def _words_of(option: str, action: argparse.Action, rest: str, waiting: list[str]) -> list[str]:
    """Return the words of one flag. ``rest`` is the text from ``=`` on; following values are taken from ``waiting``."""
    if option == "--help":
        return [option]  # vLLM's --help=GROUP selects flags; all are shown here
    if isinstance(action, argparse.BooleanOptionalAction):
        if not rest and waiting and waiting[-1].lower() in BOOLEANS:
            rest = "=" + waiting.pop()
        is_on = BOOLEANS.get(rest[1:].lower())
        return [option + rest] if is_on is None else [option if is_on else _opposite(option, action)]
    if option in NUMBER_LISTS and not rest:
        numbers = []
        while waiting and _NUMBERS.fullmatch(waiting[-1]):
            numbers.append(waiting.pop())
        return [f"{option}={','.join(numbers)}"] if numbers else [option]
    return [option + rest]


def _opposite(option: str, action: argparse.Action) -> str:
    if not option.startswith("--"):
        option = next(each for each in action.option_strings if each.startswith("--"))
    return "--" + option[5:] if option.startswith("--no-") else "--no-" + option[2:]


def _put(into: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """Set the value at a path of keys. A last key that ends with ``+`` extends a list, also by values with commas."""
    for key in keys[:-1]:
        inner = into.setdefault(key, {})
        into = inner if isinstance(inner, dict) else into.setdefault(key, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = count(text, keys[-1]) if _WITH_UNIT.fullmatch(text) else text
    key = keys[-1]
    if key.endswith("+"):
        listed = into.setdefault(key[:-1], [])
        value = value.split(",") if isinstance(value, str) else value
        listed += value if isinstance(value, list) else [value]
    else:
        into[key] = value


def _with_nested(words: Sequence[str], nested: Mapping[str, dict[str, Any]], actions: Actions) -> list[str]:
    """Append the JSON values, merged into the objects of the same flags."""
    found = list(words)
    for option, given in nested.items():
        whole: dict[str, Any] = {}
        for at in reversed(range(len(found))):
            name, equals, value = found[at].partition("=")
            if _long(name, actions) == option:
                taken = found[at : at + 1 if equals else at + 2]
                whole = _object(value if equals else taken[-1]) | whole
                del found[at : at + len(taken)]
        found.append(f"{option}={json.dumps(whole | given)}")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
