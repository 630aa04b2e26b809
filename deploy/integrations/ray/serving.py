"""An application of Ray Serve: a whole server in each replica, behind Serve's proxies, with all of its API.

    serve run quintet.deploy.integrations.ray.serving:application model=Qwen/Qwen3-0.6B max_model_len=8192 replicas=2 num_cpus=8

Serve chooses a replica, places it and counts what it has to do; within a replica nothing differs from `quintet serve`: whoever
dies there is replaced there. A replica listens on a Unix socket of its own alone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import yaml
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from quintet.deploy.config.flag_table import make_options
from quintet.deploy.integrations.ray.actor import with_its_processors
from quintet.process.sockets import make_run_dir

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
)
"""Headers of one connection (RFC 9110, 7.6.1): not passed on."""
_NOT_PASSED_ON = _HOP_BY_HOP | {"host", "content-length"}
_LOOK_S = 0.1
_END_S = 10.0
"""For the processes to end in, behind ``--drain-timeout``."""


class Replica:
    """One server, and the way to it."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        self._leave_s = leave_s(flags)
        self._folder = make_run_dir()
        self._socket = self._folder / "door"
        config = self._folder / "server.yaml"
        config.write_text(yaml.safe_dump(with_its_processors(flags)))
        held, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "quintet.deploy.integrations.ray.child", "--config", str(config)]
        self._process = subprocess.Popen(
            [*command, "--uds", str(self._socket), "--parent-fd", str(held)], pass_fds=[held]
        )
        os.close(held)
        self._end = weakref.finalize(self, _end, self._process, self._lifeline, self._folder, self._leave_s)
        self._session: aiohttp.ClientSession | None = None
        self._booted: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raise when only a new replica helps. A server whose processes are being replaced heals itself."""
        self._check_alive()
        if self._booted is None:
            self._booted = asyncio.create_task(self._wait_ready())
        await self._booted
        async with self._connected().get("http://replica/livez") as answer:
            answer.raise_for_status()

    def _check_alive(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"the server ended with status {status}; the replica's log has its last words")

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._socket), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session

    async def _wait_ready(self) -> None:
        while True:
            self._check_alive()
            try:
                async with self._connected().get("http://replica/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # it boots
            await asyncio.sleep(_LOOK_S)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes. A client that leaves is seen by the server as gone."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        query = f"?{request.url.query}" if request.url.query else ""
        sent = await self._connected().request(
            request.method,
            f"http://replica{path}{query}",
            headers=[(name, value) for name, value in request.headers.items() if name not in _NOT_PASSED_ON],
            data=await request.body() or None,
            allow_redirects=False,
        )
        answer = StreamingResponse(_pieces(sent), status_code=sent.status)
        answer.raw_headers = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in sent.headers.items()
            if name.lower() not in _HOP_BY_HOP
        ]
        return answer

    async def __del__(self) -> None:
        """Drain, when Serve takes the replica away."""
        if self._session is not None:
            await self._session.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, self._leave_s)
        finally:
            self._end()


async def _pieces(sent: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with sent:
        async for piece in sent.content.iter_any():
            yield piece


def leave_s(flags: Mapping[str, object]) -> float:
    """Return how long a server of these flags may take from the word to end to its end, in seconds."""
    return make_options(flags, "serve run").drain_timeout + _END_S


def _end(process: subprocess.Popen[bytes], lifeline: int, folder: Path, patience_s: float) -> None:
    """Leave nothing: the end of the pipe ends a server that still runs."""
    os.close(lifeline)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def application(settings: Mapping[str, object]) -> serve.Application:
    """Build the application: ``replicas``, ``num_cpus`` and ``num_gpus`` are Serve's, the rest are flags of `quintet serve`.

    Raises `ConfigError` for a flag that does not exist, before anything is placed.
    """
    flags = {
        name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in settings.items()
    }
    replicas, cpus, gpus = flags.pop("replicas", 1), flags.pop("num_cpus", 1), flags.pop("num_gpus", 0)
    leaves_in_s = leave_s(flags) + _END_S
    deployment = serve.deployment(
        Replica,
        name="Quintet",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=256,  # the server has a queue of its own, and batches what is in it
        graceful_shutdown_timeout_s=leaves_in_s,  # of which Serve waits for its requests, then for the server
        health_check_timeout_s=30,
    )
    return deployment.bind(flags)
