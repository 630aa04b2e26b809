"""Container image: its sources exist, its commands are of this package, and it builds where a builder is installed."""

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
    """Return every instruction and its arguments, on one line."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, words) for name, _, words in (line.partition(" ") for line in text.splitlines()) if words]


def arguments_of(name: str) -> list[str]:
    found = [words for each, words in instructions() if each == name]
    assert found, name
    return found


def is_in_context(path: str) -> bool:
    """Return True for a path in the build context: the last pattern that matches it or a parent folder decides."""
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


def test_copied_paths_exist_and_are_in_context() -> None:
    sources = [source for words in arguments_of("COPY") for source in words.split()[:-1]]
    assert "." in sources and not [each for each in sources if each.startswith("--")]
    for source in sources:
        assert (ROOT / source).exists() and (source == "." or is_in_context(source)), source
    for needed in ("pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"]):
        assert is_in_context(needed), needed


def test_every_package_folder_is_in_context() -> None:
    """Each is a symlink under src."""
    folders = [path.name for path in (ROOT / "src" / "quintet").iterdir() if path.is_symlink()]
    assert folders and [name for name in folders if not is_in_context(f"{name}/__init__.py")] == []
    assert not is_in_context("tests/conftest.py") and not is_in_context("executor/backends/cpu/ops/_host.so")


def test_run_instructions_use_this_package() -> None:
    run = " && ".join(arguments_of("RUN"))
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


def test_entrypoint_is_the_command_with_its_flags() -> None:
    [entry] = json.loads(arguments_of("ENTRYPOINT")[0])
    assert entry in PROJECT["scripts"]
    options = options_from(json.loads(arguments_of("CMD")[0]))
    [port] = arguments_of("EXPOSE")
    assert (options.host, str(options.port)) == ("0.0.0.0", port)
    [port_flag] = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", arguments_of("HEALTHCHECK")[0])
    assert is_open(port_flag)


def builder() -> str | None:
    """Return an installed image builder that has the base image or can fetch it."""
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
def test_image_builds() -> None:
    name = builder()
    if name is None:
        pytest.skip(f"no docker, podman or buildah that works here and has, or can fetch, {BASE}")
    command = [name, "build", "--file", str(FILE), "--tag", TAG, "--build-arg", "CUDA=cpu", str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    assert name == "buildah" or runs(name, "run", "--rm", TAG, "serve", "--help")
