"""Flags of sampling defaults: invalid values are rejected, unknown names are noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError


def resolve_flags(folder: Path, **flags: Any) -> Resolution:
    model = write_model(folder / "model")
    return resolve(Options(model=str(model), executor="mock", **flags), folder / "run")


def test_a_generation_override_that_is_not_a_number_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--override-generation-config: temperature is 'hot'; it must be a number"
    ):
        resolve_flags(tmp_path, override_generation_config={"temperature": "hot"})


def test_an_unknown_generation_override_is_noted(tmp_path: Path) -> None:
    notes = resolve_flags(tmp_path, override_generation_config={"top_q": 1}).notes
    assert [
        note
        for note in notes
        if note.startswith("--override-generation-config: top_q ignored; sampling defaults are")
    ]


def test_a_missing_folder_of_generation_defaults_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--generation-config .*does not exist; give auto, none, or a folder"
    ):
        resolve_flags(tmp_path, generation_config=str(tmp_path / "none"))


def test_end_tokens_of_the_flags_are_added_to_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    flags = {"override_generation_config": {"eos_token_id": 8}, "generation_config": str(tmp_path / "other")}
    resolution = resolve_flags(tmp_path, **flags)
    assert sorted(resolution.config.model.eos_token_ids) == [2, 7, 8]
    assert not [note for note in resolution.notes if "eos_token_id" in note]
