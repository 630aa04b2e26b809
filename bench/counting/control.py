"""Start and end the trace of `sitecustomize` in the processes of a server."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.counting import sitecustomize
from bench.overhead.server import Server, serve

ROLES = ("frontend", "tokenizer", "core", "executor", "detokenizer")
WRITE_TIMEOUT_S = 60.0


class TracedServer:
    """A server with `sitecustomize` in each of its processes."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.target = server.target
        self._folder = folder
        self._processes: dict[str, psutil.Process] = {}
        for child in psutil.Process(server.process.pid).children(recursive=True):
            role = (child.cmdline() or [""])[0].removeprefix("quintet-").partition("-")[0]
            if role in ROLES:
                self._processes[role] = child

    @contextmanager
    def trace(self) -> Iterator[dict[str, str]]:
        """Trace the block; at its end, the yielded dictionary has the result of each role."""
        results: dict[str, str] = {}
        self._toggle()
        yield results
        self._toggle()
        for role, process in self._processes.items():
            results[role] = _read(self._folder / str(process.pid))

    def _toggle(self) -> None:
        for process in self._processes.values():
            process.send_signal(sitecustomize.TOGGLE)


@contextmanager
def serve_traced(
    kind: str, model: Path | None, flags: Sequence[str] = (), checkout: Path | None = None
) -> Iterator[TracedServer]:
    """Run a server until the block ends. kind: value of `sitecustomize.KIND`; other arguments: see `serve`."""
    with tempfile.TemporaryDirectory(prefix="counts-") as folder:
        variables = {sitecustomize.FOLDER: folder, sitecustomize.KIND: kind}
        os.environ.update(variables)
        try:
            with serve(model, flags, checkout, [Path(sitecustomize.__file__).parent]) as server:
                yield TracedServer(server, Path(folder))
        finally:
            for name in variables:
                del os.environ[name]


def _read(path: Path) -> str:
    deadline_s = time.monotonic() + WRITE_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} was not written within {WRITE_TIMEOUT_S:g} s")
        time.sleep(0.01)
    text = path.read_text()
    path.unlink()
    return text
