"""``OWNER/NAME:file.gguf``: one file of a hub repository, or all parts of a split model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from quintet.deploy.cli.main import main
from quintet.deploy.config.model.source import locate_model
from quintet.wire.errors import ConfigError
from tests.gguf.files import write_model
from tests.models.random_checkpoints import of_transformers, write_checkpoint

FILES = (
    *("README.md", "config.json", "m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj.gguf"),
    *(f"m-F32-0000{part}-of-00003.gguf" for part in (1, 2, 3)),
)
IN_FOLDERS = ("Q4_0/m-00001-of-00002.gguf", "Q4_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate the hub cache of a repository with `FILES`; files are empty unless the folder ``hub`` has their content."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "hub").mkdir()

    def fetch(
        name: str,
        revision: str | None = None,
        allow_patterns: Any = None,
        ignore_patterns: Any = None,
        cache_dir: str | None = None,
    ) -> str:
        assert name in ("owner/name", "owner/name-GGUF") and revision is None
        for file in filter_repo_objects(
            [*FILES, *IN_FOLDERS], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            its, there = tmp_path / "hub" / file, tmp_path / "cache" / file
            there.parent.mkdir(exist_ok=True)
            shutil.copy(its, there) if its.exists() else there.touch()
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["owner/name:m-Q4_0.gguf", "owner/name/m-Q4_0.gguf"])
def test_a_file_is_fetched_alone(name: str, cache: Path) -> None:
    assert locate_model(name, with_weights=True) == cache / "m-Q4_0.gguf"
    assert [path.name for path in cache.iterdir()] == ["m-Q4_0.gguf"]


@pytest.mark.parametrize("named", [1, 3])
def test_all_parts_are_fetched_for_any_named_part(named: int, cache: Path) -> None:
    first = locate_model(f"owner/name:m-F32-0000{named}-of-00003.gguf", with_weights=True)
    assert first == cache / "m-F32-00001-of-00003.gguf"
    assert sorted(path.name for path in cache.iterdir()) == list(FILES[-3:])


def test_files_in_subfolders_are_fetched(cache: Path) -> None:
    first = locate_model("owner/name:Q4_0/m-00002-of-00002.gguf", with_weights=True)
    assert first == cache / "Q4_0/m-00001-of-00002.gguf"
    assert sorted(cache.rglob("*.gguf")) == [cache / file for file in IN_FOLDERS[:2]]


@pytest.mark.parametrize("kind", ["Q4_0", "q4_0"])
def test_the_file_of_a_type_is_fetched(kind: str, cache: Path) -> None:
    assert locate_model(f"owner/name:{kind}", with_weights=True) == cache / "m-Q4_0.gguf"
    assert [path.name for path in cache.iterdir()] == ["m-Q4_0.gguf"]


@pytest.mark.parametrize("with_weights", [True, False])
def test_the_parts_of_a_type_are_fetched(with_weights: bool, cache: Path) -> None:
    assert locate_model("owner/name:F32", with_weights) == cache / "m-F32-00001-of-00003.gguf"
    assert len([*cache.iterdir()]) == (3 if with_weights else 1)


@pytest.mark.parametrize("name", ["./models/m/m.gguf", "/models/m/m.gguf", "~/models/m/m.gguf"])
def test_a_missing_local_file_is_not_looked_for_at_the_hub(name: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf': file not found"):
        locate_model(name, with_weights=True)


def test_a_type_without_a_file_is_a_one_line_error(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"owner/name:F3: the repository has no GGUF file of this type"):
        locate_model("owner/name:F3", with_weights=True)


def test_a_repository_of_gguf_files_needs_a_type(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a repository of GGUF files: name a type or a file, .*:Q4_K_M"):
        locate_model("owner/name-GGUF", with_weights=True)


def test_without_weights_only_the_first_part_is_fetched(cache: Path) -> None:
    first = locate_model("owner/name:m-F32-00002-of-00003.gguf", with_weights=False)
    assert [*cache.iterdir()] == [first] == [cache / "m-F32-00001-of-00003.gguf"]


def test_parts_that_are_links_of_the_hub_cache_keep_their_names(tmp_path: Path) -> None:
    for part in (1, 2):
        (tmp_path / f"{part}a4c").touch()
        (tmp_path / f"m-0000{part}-of-00002.gguf").symlink_to(tmp_path / f"{part}a4c")
    first = locate_model(str(tmp_path / "m-00002-of-00002.gguf"), with_weights=True)
    assert first == tmp_path / "m-00001-of-00002.gguf"


def test_a_link_to_the_first_part_finds_the_others(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    first.touch()
    (tmp_path / "model.gguf").symlink_to(first)
    assert locate_model(str(tmp_path / "model.gguf"), with_weights=True) == first


def test_a_hub_file_is_planned_like_a_local_file(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_checkpoint(of_transformers("LlamaConfig"), folder)
    write_model(folder, tmp_path / "hub" / "m-Q8_0.gguf", "q8_0")
    assert main(["plan", "owner/name:m-Q8_0.gguf", "--device", "cpu", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["quantization"] == "gguf" and plan["checkpoint_format"].startswith("gguf: ")
    assert main(["plan", "owner/name:m-Q9.gguf", "--device", "cpu", "--json"]) != 0
    error = capsys.readouterr().err
    assert "m-Q9.gguf: is missing" in error and error.count("\n") == 1
