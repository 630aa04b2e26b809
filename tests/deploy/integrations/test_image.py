"""The image's file: what it copies is there, what it runs is of this package; and it builds, where there is who builds images."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.deploy.integrations.test_deployments import options_from

from quintet.frontend.http.auth import is_open

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy" / "integrations" / "docker" / "Dockerfile"
IGNORED = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
[PYTHON] = re.findall(r"^ARG PYTHON=(\S+)$", FILE.read_text(), re.MULTILINE)
BASE = f"python:{PYTHON}-slim-bookworm"
TAG = "quintet:of-its-test"


def instructions() -> list[tuple[str, str]]:
    """Every instruction and what it says, on one line."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, words) for name, _, words in (line.partition(" ") for line in text.splitlines()) if words]


def said(name: str) -> list[str]:
    found = [words for each, words in instructions() if each == name]
    assert found, name
    return found


def is_let_in(path: str) -> bool:
    """Whether a path is of what the image is built from: the last pattern that fits it or a folder around it decides."""
    parts = path.split("/")
    around = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    is_in = True
    for line in IGNORED:
        pattern = line.lstrip("!")
        if line.startswith("#") or not pattern:
            continue
        anywhere = pattern.removeprefix("**/")
        names = [each.rpartition("/")[2] for each in around] if anywhere != pattern else around
        if any(fnmatch(each, anywhere) for each in names):
            is_in = line.startswith("!")
    return is_in


def test_what_is_copied_is_there_and_let_in() -> None:
    sources = [source for words in said("COPY") for source in words.split()[:-1]]
    assert "." in sources and not [each for each in sources if each.startswith("--")]
    for source in sources:
        assert (ROOT / source).exists() and (source == "." or is_let_in(source)), source
    for needed in ("pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]):
        assert is_let_in(needed), needed


def test_every_folder_of_the_package_is_let_in() -> None:
    """Each is a symlink under src, which would lead nowhere."""
    folders = [path.name for path in (ROOT / "src" / "quintet").iterdir() if path.is_symlink()]
    assert folders and [name for name in folders if not is_let_in(f"{name}/__init__.py")] == []
    assert not is_let_in("tests/conftest.py") and not is_let_in("executor/backends/cpu/ops/_host.so")


def test_what_is_run_is_of_this_package() -> None:
    run = " && ".join(said("RUN"))
    modules = re.findall(r"python -m ([\w.]+)", run)
    assert modules and [name for name in modules if importlib.util.find_spec(name) is None] == []
    extras = {name for each in re.findall(r'extra="\[([^"]+)\]"', run) for name in each.split(",")}
    versions = {"cuda${CUDA%%.*}": [f"cuda{version}" for version in (12, 13)]}
    for extra in extras:
        for name in versions.get(extra, [extra]):
            assert name in PROJECT["optional-dependencies"], name
    assert re.findall(r"/wheels/([\w]+)-\*\.whl", run) == [PROJECT["name"]]
    pinned = dict(re.findall(r"pip install --no-cache-dir (\w+)==(\S+)", run))
    constraints = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned and pinned == {name: constraints[name] for name in pinned}


def test_what_starts_is_the_command_with_its_flags() -> None:
    [entry] = json.loads(said("ENTRYPOINT")[0])
    assert entry in PROJECT["scripts"]
    options = options_from(json.loads(said("CMD")[0]))
    [port] = said("EXPOSE")
    assert (options.host, str(options.port)) == ("0.0.0.0", port)
    [asked] = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", said("HEALTHCHECK")[0])
    assert is_open(asked)


def builder() -> str | None:
    """Whoever builds images here, if there is one that has, or can fetch, what ours begins with."""
    for name in ("docker", "podman", "buildah"):
        if (
            shutil.which(name) is not None
            and runs(name, "info")
            and runs(name, "pull", f"docker.io/library/{BASE}")
        ):
            return name
    return None


def runs(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode == 0


@pytest.mark.whole
def test_the_image_is_built() -> None:
    name = builder()
    if name is None:
        pytest.skip(f"no docker, podman or buildah that works here and has, or can fetch, {BASE}")
    command = [name, "build", "--file", str(FILE), "--tag", TAG, "--build-arg", "CUDA=cpu", str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    assert name == "buildah" or runs(name, "run", "--rm", TAG, "serve", "--help")
