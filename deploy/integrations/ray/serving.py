"""Ray Serve application: a complete Quintet server in each replica, with its full API.

    serve run quintet.deploy.integrations.ray.serving:application model=Qwen/Qwen3-0.6B max_model_len=8192 replicas=2 num_cpus=8

Serve places replicas and balances requests. Within a replica, the supervisor of `quintet serve` restarts failed processes. A
replica listens on a private Unix socket.
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
from quintet.deploy.integrations.ray.host import with_assigned_threads
from quintet.deploy.supervisor.run_dirs import make_run_dir

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
)
"""Hop-by-hop headers (RFC 9110, 7.6.1), not forwarded."""
_NOT_PASSED_ON = _HOP_BY_HOP | {"host", "content-length"}
_LOOK_S = 0.1
_END_S = 10.0
"""Time for processes to stop after ``--drain-timeout``."""


class Replica:
    """A server process, and a proxy to it."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        self._shutdown_limit_s = shutdown_limit_s(flags)
        self._folder = make_run_dir()
        self._socket = self._folder / "http.sock"
        config = self._folder / "server.yaml"
        config.write_text(yaml.safe_dump(with_assigned_threads(flags)))
        parent_read, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "quintet.deploy.integrations.ray.child", "--config", str(config)]
        self._process = subprocess.Popen(
            [*command, "--uds", str(self._socket), "--parent-fd", str(parent_read)], pass_fds=[parent_read]
        )
        os.close(parent_read)
        self._end = weakref.finalize(
            self, _end, self._process, self._lifeline, self._folder, self._shutdown_limit_s
        )
        self._session: aiohttp.ClientSession | None = None
        self._booted: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raise if the replica must be replaced. A server that restarts its processes is healthy."""
        self._check_alive()
        if self._booted is None:
            self._booted = asyncio.create_task(self._wait_ready())
        await self._booted
        async with self._connected().get("http://replica/livez") as answer:
            answer.raise_for_status()

    def _check_alive(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"the server exited with status {status}; see the replica's log")

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
                pass  # starting up
            await asyncio.sleep(_LOOK_S)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Forward a request and stream the response. A client disconnect is forwarded to the server."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        query = f"?{request.url.query}" if request.url.query else ""
        upstream = await self._connected().request(
            request.method,
            f"http://replica{path}{query}",
            headers=[(name, value) for name, value in request.headers.items() if name not in _NOT_PASSED_ON],
            data=await request.body() or None,
            allow_redirects=False,
        )
        answer = StreamingResponse(_chunks(upstream), status_code=upstream.status)
        answer.raw_headers = [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in upstream.headers.items()
            if name.lower() not in _HOP_BY_HOP
        ]
        return answer

    async def __del__(self) -> None:
        """Drain when Serve removes the replica."""
        if self._session is not None:
            await self._session.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, self._shutdown_limit_s)
        finally:
            self._end()


async def _chunks(upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with upstream:
        async for chunk in upstream.content.iter_any():
            yield chunk


def shutdown_limit_s(flags: Mapping[str, object]) -> float:
    """Return the maximum shutdown time of a server with these flags, in seconds."""
    return make_options(flags, "serve run").drain_timeout + _END_S


def _end(process: subprocess.Popen[bytes], lifeline: int, folder: Path, timeout_s: float) -> None:
    """Clean up; closing the pipe stops a running server."""
    os.close(lifeline)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def application(settings: Mapping[str, object]) -> serve.Application:
    """Build the application; ``replicas``, ``num_cpus`` and ``num_gpus`` are for Serve, the rest are `quintet serve` flags.

    Raises `ConfigError` for an unknown flag, before placement.
    """
    flags = {
        name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in settings.items()
    }
    replicas, cpus, gpus = flags.pop("replicas", 1), flags.pop("num_cpus", 1), flags.pop("num_gpus", 0)
    shutdown_s = shutdown_limit_s(flags) + _END_S
    deployment = serve.deployment(
        Replica,
        name="Quintet",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=256,  # the server has its own queue and batching
        graceful_shutdown_timeout_s=shutdown_s,  # includes the requests' drain and the server's shutdown
        health_check_timeout_s=30,
    )
    return deployment.bind(flags)
