"""Environments of third-party clients, one session each: ``make clients`` creates all, ``.venv/bin/nox --session NAME`` one.

The environment of a session is ``.venv/clients/NAME``. Its packages are those of ``tests/clients/requirements/NAME.txt``, or of
``NAME.json`` for npm. An environment with unchanged requirements is kept: its file ``installed`` has their hash.
"""

from __future__ import annotations

import hashlib
import shutil
import sysconfig
from pathlib import Path

import nox

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "tests/clients/requirements"
ENVIRONMENTS = ROOT / ".venv/clients"

WITHOUT_DEPENDENCIES = {
    "lm_eval": ("accelerate==1.15.0",),
    "lmcache": ("lmcache==0.5.6",),
    "real": ("accelerate==1.15.0",),
    "store": ("nixl==1.5.1", "nixl-cu12==1.5.1"),
}
"""Packages that use torch from this project's environment."""

SHARES_PACKAGES = {"fastchat", "gateway", "kserve", "lm_eval", "lmcache", "ray", "real", "store"}
"""Environments that import packages of this project's environment: torch and transformers, for example."""

CONTAINS_QUINTET = {"fastchat", "gateway", "kserve", "lmcache", "ray", "store"}
"""Environments in which Quintet runs."""

nox.options.default_venv_backend = "uv"
nox.options.envdir = str(ENVIRONMENTS)
nox.options.sessions = []


def _hash(path: Path) -> str:
    options = (WITHOUT_DEPENDENCIES.get(path.stem), path.stem in SHARES_PACKAGES)
    return hashlib.sha256(path.read_bytes() + repr(options).encode()).hexdigest()


def _is_current(path: Path) -> bool:
    installed = ENVIRONMENTS / path.stem / "installed"
    return installed.exists() and installed.read_text() == _hash(path)


def _install(session: nox.Session, path: Path) -> None:
    name = path.stem
    (site_packages,) = (ENVIRONMENTS / name).glob("lib/*/site-packages")
    if name == "open_webui":  # its slim requirements: no torch
        session.install("--no-deps", "--requirement", str(path))
        session.install("--requirement", str(site_packages / "requirements-slim.txt"))
        return
    if name in WITHOUT_DEPENDENCIES:
        session.install("--no-deps", *WITHOUT_DEPENDENCIES[name])
    session.install("--requirement", str(path))
    folders = [sysconfig.get_path("purelib")] if name in SHARES_PACKAGES else []
    folders += [str(ROOT / "src")] if name in CONTAINS_QUINTET else []
    if folders:
        (site_packages / "quintet.pth").write_text("".join(f"{folder}\n" for folder in folders))


def _install_npm(session: nox.Session, path: Path) -> None:
    """Install without install scripts; the binaries are in separate packages."""
    if shutil.which("npm") is None:
        session.skip(f"npm is not installed: the tests of {path.stem} will be skipped")
    folder = ENVIRONMENTS / path.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(path, folder / "package.json")
    options = ("--silent", "--ignore-scripts", "--no-audit", "--no-fund")
    session.run("npm", "install", "--prefix", str(folder), *options, external=True)


def _add_session(path: Path) -> None:
    is_npm = path.suffix == ".json"

    @nox.session(
        name=path.stem,
        tags=["clients"],
        reuse_venv=_is_current(path),
        venv_backend="none" if is_npm else None,
    )
    def create(session: nox.Session) -> None:
        """Create the environment, unless its requirements are unchanged."""
        if not _is_current(path):
            (_install_npm if is_npm else _install)(session, path)
            (ENVIRONMENTS / path.stem / "installed").write_text(_hash(path))


for _path in sorted(REQUIREMENTS.iterdir()):
    _add_session(_path)


@nox.session(reuse_venv=True)
def fuzz(session: nox.Session) -> None:
    """Fuzz a server with schemathesis, from /openapi.json."""
    session.install("schemathesis>=4.32,<5")
    program = (str(ROOT / ".venv/bin/python"), "-m", "tests.processes.fuzz")
    session.run(*program, str(Path(session.bin) / "schemathesis"), *session.posargs, external=True)
