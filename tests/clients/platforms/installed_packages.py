"""Check that the sdist and the wheel install outside of the checkout and complete a prompt: `make dist`.

    .venv/bin/python tests/clients/platforms/installed_packages.py

Kernels are not compiled (QUINTET_KERNELS=none): torch computes. Dependencies come from the environment that runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")
COMPLETE = """
import quintet
from quintet import LLM, SamplingParams
with LLM() as llm:
    [output] = llm.generate(["import os\\nimport "], SamplingParams(temperature=0, max_tokens=4))
    print(quintet.__file__, repr(output.outputs[0].text))
    assert output.outputs[0].token_ids
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; raise with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "QUINTET_KERNELS": "none"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}")
    print(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "", flush=True)


def link_dependencies(python: Path) -> None:
    """Add the packages of the running environment to the import path of another environment."""
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(found.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def check(package: Path, folder: Path) -> None:
    """Install a package in a new environment, and complete a prompt with it."""
    environment = folder / package.suffix.strip(".")
    run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=folder)
    python = environment / "bin" / "python"
    link_dependencies(python)
    run(
        *(UV, "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--python", python, package),
        cwd=folder,
    )
    run(python, "-c", COMPLETE, cwd=folder)
    run(environment / "bin" / "quintet", "--version", cwd=folder)


def main() -> None:
    """Build both packages and check each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(
            *(UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable),
            *("--out-dir", folder, ROOT),
            cwd=folder,
        )  # the wheel is built from the sdist
        [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
        for package in (sdist, wheel):
            print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB", flush=True)
            check(package, folder)


if __name__ == "__main__":
    main()
