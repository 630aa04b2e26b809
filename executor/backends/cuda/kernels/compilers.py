"""Compilers of kernels: nvcc, and NVRTC called as CuPy calls it. Neither needs a GPU.

Owns discovery, invocation and version of each compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quintet.executor.backends.cuda.kernels.modules import FLAGS

TOOLCHAIN = Path(sys.prefix) / "cuda"
"""Folder into which `make cubins` installs the compilers."""


class CompileError(Exception):
    """A source does not compile; the message is the compiler's."""


class MissingCompilerError(Exception):
    """A compiler is not installed; the message explains the installation."""


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a compilation."""

    cubin: bytes
    ptx: bytes | None
    """Only from NVRTC; None from nvcc."""
    log: str
    """Assembler's report of each kernel, and warnings."""


class Compiler(Protocol):
    """A compiler; thread-safe."""

    @property
    def version(self) -> str:
        """Name and version in one line."""

    def compile(self, module: str, text: str, target: int) -> Output:
        """Compile one module for ``sm_<target>``; `CompileError` with the compiler's message."""


class Nvcc:
    """A `Compiler`: nvcc, run as one process per source. It needs g++ for preprocessing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        release = [line for line in output.splitlines() if "release" in line]
        self.version = f"nvcc {release[0].rpartition('release')[2].strip()}" if release else "nvcc"

    def compile(self, module: str, text: str, target: int) -> Output:
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder, f"{module}.cu"), Path(folder, f"{module}.cubin")
            source.write_text(text)
            architecture = f"-gencode=arch=compute_{target},code=sm_{target}"
            call = [
                str(self._path),
                *FLAGS,
                "-Xptxas=-v",
                architecture,
                "-cubin",
                "-o",
                str(cubin),
                str(source),
            ]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            log = done.stdout + done.stderr
            if done.returncode != 0:
                raise CompileError(log.strip() or f"nvcc failed with status {done.returncode} and no output")
            return Output(cubin.read_bytes(), None, log)


class Nvrtc:
    """A `Compiler`: NVRTC through its C interface. CuPy uses the same library, but needs a device.

    quick: compile in one sixth of the time, only to check the sources; the output must not be used.
    """

    def __init__(self, path: Path, *, quick: bool = False) -> None:
        self._quick = ("--Ofast-compile=max",) if quick else ()
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"NVRTC {major.value}.{minor.value}{', quick' if quick else ''}"

    def compile(self, module: str, text: str, target: int) -> Output:
        # The flags are those of CuPy's ``RawModule``, plus one for the assembler's report.
        flags = [
            *FLAGS,
            *self._quick,
            "--device-as-default-execution-space",
            f"-arch=sm_{target}",
            "--ptxas-options=-v",
        ]
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), f"{module}.cu".encode(), 0, None, None
            )
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(flags), options)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise CompileError(log.strip() or self._message(status))
            return Output(self._read(program, "CUBIN"), self._read(program, "PTX").rstrip(b"\0"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self._library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._library[f"nvrtcGet{what}"](program, text))
        return text.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise CompileError(f"NVRTC: {self._message(status)}")

    def _message(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


def find_nvcc() -> Nvcc:
    """Return the nvcc of `make cubins`, of a wheel, or of the system, in this order."""
    for root in _wheels():
        path = root / "cu13" / "bin" / "nvcc"
        if path.is_file():
            return Nvcc(path)
    toolkit = _toolkit()
    on_path = shutil.which("nvcc") or (shutil.which("nvcc", path=str(toolkit / "bin")) if toolkit else None)
    if on_path is None:
        raise MissingCompilerError(f"nvcc was not found in {TOOLCHAIN}, PATH or CUDA_HOME: run `make cubins`")
    return Nvcc(Path(on_path))


def find_nvrtc(*, quick: bool = False) -> Nvrtc:
    """Return the NVRTC of `make cubins`, of a wheel (torch depends on one), or of the system, in this order."""
    patterns = [(root, pattern) for root in _wheels() for pattern in ("cuda_nvrtc/lib", "cu13/lib")]
    toolkit = _toolkit()
    if toolkit is not None:
        patterns.append((toolkit, "lib64"))
    for root, folder in patterns:
        for path in sorted((root / folder).glob("libnvrtc.so*")):
            return Nvrtc(path, quick=quick)
    raise MissingCompilerError(
        f"libnvrtc.so was not found in {TOOLCHAIN}, a wheel or CUDA_HOME: run `make cubins`"
    )


def _wheels() -> Iterator[Path]:
    """Yield the folders of NVIDIA's wheels."""
    yield TOOLCHAIN / "nvidia"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(folder)


def _toolkit() -> Path | None:
    for path in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if path and Path(path).is_dir():
            return Path(path)
    return None
