"""Old names of flags and values: accepted for one version, with a deprecation line that gives the new name."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.deploy.config.flag import option

RENAMED: dict[str, str] = {
    "depth": "max_steps_in_flight",
    "refuse_hopeless": "deadline_admission",
    "spares": "standby",
}
"""Old key -> new key of `Options`."""

SWITCHES = {"refuse_hopeless", "spares"}
"""Old keys of flags without a value."""

RENAMED_VALUES: dict[str, dict[str, str]] = {"role": {"alone": "none"}}
"""Key -> old value -> new value."""

_log = logging.getLogger("quintet")


def warn(old: str, new: str) -> None:
    _log.warning("%s is deprecated; use %s", old, new)


def add_deprecated_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the old flags, hidden in the help."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for key in RENAMED:
        if key in SWITCHES:
            parser.add_argument(option(key), action=argparse.BooleanOptionalAction, **hidden)
        else:
            parser.add_argument(option(key), **hidden)


def with_new_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Replace old keys and values by the new ones, and log a line for each. A new key wins over its old one."""
    found: dict[str, object] = {}
    old_settings: dict[str, object] = {}
    for raw_key, value in settings.items():
        key = str(raw_key).replace("-", "_")
        if key in RENAMED:
            warn(option(key), option(RENAMED[key]))
            old_settings[RENAMED[key]] = value
            continue
        values = RENAMED_VALUES.get(key, {})
        if isinstance(value, str) and value in values:
            warn(f"{option(key)} {value}", f"{option(key)} {values[value]}")
            found[raw_key] = values[value]
        else:
            found[raw_key] = value
    given = {str(key).replace("-", "_") for key in found}
    return found | {key: value for key, value in old_settings.items() if key not in given}


class RenamedFlag(argparse.Action):
    """Old name of a flag of a command without `Options`: logs the deprecation and stores under the new destination."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, appends: bool = False, **rest: Any
    ) -> None:
        """Take the destination of the new flag as ``dest``; ``appends``: the flag may be repeated."""
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **rest)
        self._appends = appends

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        warn(str(flag), option(self.dest))
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), values] if self._appends else values)
