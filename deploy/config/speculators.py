"""MODEL as a draft head of the library ``speculators``: ``config.json`` names the model that the head was trained for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.source import locate_model
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import read_json

_NAME = "speculator"
"""Part of the hub names of these heads: ``RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3``."""


class _Verifier(msgspec.Struct):
    name_or_path: str


class _Proposal(msgspec.Struct):
    speculative_tokens: int


class _Section(msgspec.Struct):
    """The part ``speculators_config``."""

    algorithm: str
    verifier: _Verifier
    proposal_methods: Annotated[list[_Proposal], msgspec.Meta(min_length=1)]


def with_verifier(options: Options) -> Options:
    """Return options that serve the model of a head, with the head; others unchanged.

    The server has the head's name, as in vLLM. May download the head's configuration. Raises `ConfigError`.
    """
    name = options.model
    if name is None or options.speculative_config is not None or not _may_be_head(name):
        return options
    path = locate_model(name, with_weights=False, revision=options.revision) / "config.json"
    section = read_json(path).get("speculators_config") if path.is_file() else None
    if section is None:
        return options
    try:
        found = msgspec.convert(section, _Section)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: speculators_config: {error}; give MODEL and --speculative-config instead"
        ) from None
    draft = {
        "method": found.algorithm,
        "model": name,
        "num_speculative_tokens": found.proposal_methods[0].speculative_tokens,
    }
    return msgspec.structs.replace(
        options,
        model=found.verifier.name_or_path,
        revision=None,
        served_model_name=options.served_model_name or [name],
        speculative_config=json.dumps(draft),
    )


def _may_be_head(name: str) -> bool:
    return _NAME in name.lower() or (Path(name).expanduser() / "config.json").is_file()
