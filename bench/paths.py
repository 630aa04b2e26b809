"""The paths of docs/deploy.md, walked: each is started by its command, asked, disturbed, and left as its users would.

    python -m bench.paths [one-box two-engines gpus replicas]

A line for each: what was checked, and how long the worst client waited. A path that this machine cannot walk says so. Exit
status 1 when something was not as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml
from tests.processes.server import Server, serve, wait_until

from bench.chaos.streams import Heard, crowd, differences, listen, play
from quintet.deploy.resolve.device import sees_a_gpu

MANIFEST = Path(__file__).parents[1] / "deploy" / "kubernetes" / "quintet.yaml"
SMALL = ("--kv-cache-memory", "64MiB", "--log-level", "WARNING")
NUM_STREAMS = 16
_PATIENCE_S = 60.0


def survives(server: Server, victim: str) -> str:
    """Kill a process under streams; return what the clients noticed. Every byte must be that of an undisturbed run."""
    asked = crowd(1, NUM_STREAMS)
    calm = asyncio.run(play(server.url, asked))

    async def disturb() -> None:
        server.children()[victim].kill()

    struck = asyncio.run(play(server.url, asked, disturb))
    assert not differences(calm, struck, asked), f"other bytes after the death of {victim}"
    wait_until(lambda: server.get("/health")[0] == 200, "everybody back")
    return (
        f"{victim} killed under {NUM_STREAMS} streams: same bytes, longest wait {struck.longest_gap_s:.2f} s"
    )


def one_box() -> str:
    """`quintet serve`: answers, survives its executor, drains."""
    with serve(*SMALL) as server:
        said = survives(server, "quintet-executor-0")
        assert server.stop() == 0, "a drain that failed"
    return f"{said}; drained"


def two_engines() -> str:
    """`quintet serve --data-parallel-size 2`: both work, either may die."""
    with serve(*SMALL, "--data-parallel-size", "2") as server:
        said = survives(server, "quintet-core-1")
        _, figures = server.get("/metrics")
        for engine in "01":
            made = [
                float(line.rsplit(" ", 1)[1])
                for line in figures.splitlines()
                if line.startswith("quintet:generation_tokens_total{") and f'index="{engine}"' in line
            ]
            assert sum(made) > 0, f"engine {engine} made no token"
        assert server.stop() == 0, "a drain that failed"
    return f"both engines made tokens; {said}; drained"


def gpus() -> str:
    """`quintet serve --data-parallel-size N` on N GPUs: the same as two engines."""
    if not sees_a_gpu(os.environ):
        return "not walked: there is no GPU here (docs/gpu.md)"
    with serve("--device", "cuda", "--log-level", "WARNING") as server:
        return survives(server, "quintet-executor-0")


def _pod(folder: Path) -> tuple[tuple[str, ...], float, float]:
    """Return the chart's flags of `quintet serve`, the pause before a pod's drain, and its grace period, in seconds."""
    by_kind = {thing["kind"]: thing for thing in yaml.safe_load_all(MANIFEST.read_text())}
    config = folder / "server.yaml"
    config.write_text(by_kind["ConfigMap"]["data"]["server.yaml"])
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    flags = [word for word in container["args"][1:] if not word.startswith(("--port=", "--host="))]
    flags = [word.replace("/etc/quintet/server.yaml", str(config)) for word in flags]
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    return tuple(flags), pause_s, float(pod["terminationGracePeriodSeconds"])


def replicas() -> str:
    """The chart's pods under a rollout: one comes, one goes, as the kubelet does it, while clients ask whoever is listed."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        flags, pause_s, grace_s = _pod(Path(folder))
        old, stays = (stack.enter_context(serve(*flags, *SMALL)) for _ in range(2))
        listed = [old, stays]
        asked = crowd(2, NUM_STREAMS, plain=True)
        calm = asyncio.run(play(stays.url, asked))
        heard: list[Heard] = []
        is_over = False

        async def client(number: int) -> None:
            turns = itertools.cycle(asked[number::4])
            while not is_over:
                request, answer = next(turns), Heard()
                await asyncio.wait_for(listen(listed[number % len(listed)].url, request, answer), _PATIENCE_S)
                assert answer.bytes_of() == calm.heard[asked.index(request)].bytes_of(), (
                    "other bytes, or none"
                )
                heard.append(answer)

        async def rollout() -> None:
            nonlocal is_over
            try:
                new = await asyncio.to_thread(stack.enter_context, serve(*flags, *SMALL))
                listed.append(new)
                listed.remove(old)
                await asyncio.sleep(pause_s)
                began_s = time.monotonic()
                old.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.process.wait, grace_s - pause_s) == 0, (
                    "a drain that failed"
                )
                drained.append(time.monotonic() - began_s)
                await asyncio.sleep(1)
            finally:
                is_over = True

        drained: list[float] = []

        async def everybody() -> None:
            await asyncio.gather(rollout(), *(client(number) for number in range(4)))

        asyncio.run(everybody())
        retried = sum(answer.num_connections > 1 for answer in heard)
        longest_s = max(answer.longest_gap_s for answer in heard)
    return (
        f"a rollout under {len(heard)} streamed requests: none failed, {retried} lost a connection, "
        f"longest wait {longest_s:.2f} s, drained in {drained[0]:.1f} s"
    )


PATHS: dict[str, Callable[[], str]] = {
    "one-box": one_box,
    "two-engines": two_engines,
    "gpus": gpus,
    "replicas": replicas,
}


def main() -> int:
    """Walk the chosen paths."""
    parser = argparse.ArgumentParser(description="Walk the paths of docs/deploy.md.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(PATHS)} (default: all)")
    chosen = parser.parse_args().paths or list(PATHS)
    if strange := [name for name in chosen if name not in PATHS]:
        parser.error(f"there is no path {strange[0]!r}; there are {', '.join(PATHS)}")
    status = 0
    for name in chosen:
        try:
            print(f"{name}: {PATHS[name]()}", flush=True)
        except (AssertionError, TimeoutError) as error:
            print(f"{name}: NOT AS PROMISED: {error or 'no answer'}", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
