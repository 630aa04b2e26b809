"""The paths of docs/deploy.md, walked: each is started by its command, asked, disturbed, and left as its users would.

    python -m bench.paths [one-box two-sockets gpus replicas apart] [--save FILE]

Of each its commands, with flags that only keep it small (`SMALL`) or quick, and a line: what was checked, and how long the worst
client waited. What this machine has not, of what a path is for, it says: sockets, GPUs, a cluster. Exit status 1 when something
was not as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from tests.processes.server import Server, route, serve, wait_until
from tests.processes.test_disaggregation import free_port

from bench.chaos.streams import StreamResult, crowd, differences, listen, play
from bench.overhead.run import Machine, _commit, machine
from quintet.deploy.config.device import default_device, num_gpus
from quintet.executor.backends.platforms.memory_nodes import nodes_of

MANIFESTS = Path(__file__).parents[1] / "deploy" / "integrations" / "kubernetes"
SMALL = ("--kv-cache-memory", "64MiB", "--log-level", "WARNING")
NUM_STREAMS = 16
_TIMEOUT_S = 60.0


class NotHere(Exception):
    """This machine has not what the path is for."""


def survives(server: Server, victim: str) -> str:
    """Kill a process under streams; return what the clients noticed. Every byte must be that of an undisturbed run."""
    requests = crowd(1, NUM_STREAMS)
    calm = asyncio.run(play(server.url, requests))

    async def disturb() -> None:
        server.children()[victim].kill()

    struck = asyncio.run(play(server.url, requests, disturb))
    assert not differences(calm, struck, requests), f"other bytes after the death of {victim}"
    wait_until(lambda: server.get("/health")[0] == 200, "all processes ready")
    return (
        f"{victim} killed under {NUM_STREAMS} streams: same bytes, longest wait {struck.longest_wait_s:.2f} s"
    )


@contextmanager
def served(*flags: str) -> Iterator[Server]:
    """Serve the packaged model with the given command."""
    with serve(*SMALL, *flags) as server:
        tell("quintet", "serve", *SMALL, *flags)
        yield server


@contextmanager
def routed(*flags: str) -> Iterator[Server]:
    """Likewise a router."""
    with route(*flags) as router:
        tell("quintet", "route", *flags)
        yield router


def tell(*words: str) -> None:
    """Print a command as a user would type it."""
    print(f"  $ {shlex.join(words)}", flush=True)


def one_box() -> str:
    """`quintet serve`: answers, survives its executor, drains."""
    with served() as server:
        said = survives(server, "quintet-executor-0")
        assert server.stop() == 0, "a drain that failed"
    return f"{said}; drained"


def two_sockets() -> str:
    """`quintet serve --data-parallel-size 2` with two working engines, either of which may die; `--tensor-parallel-size 2`."""
    with served("--data-parallel-size", "2") as server:
        check_engines(server, 2)
        engines = survives(server, "quintet-core-1")
        assert server.stop() == 0, "a drain that failed"
    with served("--tensor-parallel-size", "2") as server:
        ranks = survives(server, "quintet-executor-0-rank-1")
        assert server.stop() == 0, "a drain that failed"
    num_nodes = len(set(nodes_of(os.sched_getaffinity(0)).values()))
    return f"both engines made tokens; {engines}; drained; two ranks: {ranks}; drained. Memory nodes here: {num_nodes}"


def check_engines(server: Server, count: int) -> None:
    """Check that every engine streams tokens. Call before one dies: tokens that it has not reported are not counted."""
    asyncio.run(play(server.url, crowd(1, NUM_STREAMS)))
    server.await_metrics()
    _, figures = server.get("/metrics")
    for engine in range(count):
        made = [
            float(line.rsplit(" ", 1)[1])
            for line in figures.splitlines()
            if line.startswith("quintet:generation_tokens_total{") and f'index="{engine}"' in line
        ]
        assert sum(made) > 0, f"engine {engine} made no token"


def gpus() -> str:
    """`quintet serve --data-parallel-size N` on N GPUs: an engine on each, of which one dies."""
    count = num_gpus(os.environ) or 0
    if default_device() != "cuda" or count < 2:
        words = "not walked, `quintet serve MODEL --data-parallel-size N` with N GPUs"
        raise NotHere(f"{words}: {count} here (docs/gpu.md)")
    with served("--data-parallel-size", str(count)) as server:
        check_engines(server, count)
        said = survives(server, "quintet-executor-0")
        assert server.stop() == 0, "a drain that failed"
    return f"{count} engines made tokens; {said}; drained"


@dataclass(frozen=True, slots=True)
class Pods:
    """The chart's settings: flags, seconds between leaving the list and SIGTERM, and from there to SIGKILL."""

    serve: tuple[str, ...]
    route: tuple[str, ...]
    unlist_s: float
    grace_s: float


_OF_THE_POD = ("--host=", "--port=", "--engine-dns=", "--api-key=", "--engine-api-key=")
"""Flags that only a pod can have."""


def _pods(folder: Path) -> Pods:
    servers, replicated = (
        list(yaml.safe_load_all((MANIFESTS / name).read_text()))
        for name in ("quintet.yaml", "quintet-replicas.yaml")
    )
    [config] = [thing["data"]["server.yaml"] for thing in servers if thing["kind"] == "ConfigMap"]
    (folder / "server.yaml").write_text(config)
    pods = {
        thing["metadata"]["name"]: thing["spec"]["template"]["spec"]
        for thing in [*replicated, *servers]
        if thing["kind"] == "Deployment"
    }
    flags = {
        name: tuple(
            word.replace("/etc/quintet", str(folder))
            for word in pod["containers"][0]["args"][1:]
            if not word.startswith(_OF_THE_POD)
        )
        for name, pod in pods.items()
    }
    pod = pods["quintet"]
    unlist_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = float(pod["terminationGracePeriodSeconds"]) - unlist_s
    return Pods(flags["quintet"], flags["quintet-router"], unlist_s, grace_s)


def replicas() -> str:
    """The chart's pods with a router, while clients stream: one comes and one goes as in a rollout, then one dies."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        pods, list_file = _pods(Path(folder)), Path(folder) / "servers"
        old, stays = (stack.enter_context(served(*pods.serve)) for _ in range(2))
        list_file.write_text(f"{old.url}\n{stays.url}\n")
        router = stack.enter_context(
            routed(*pods.route, "--engines", str(list_file), "--poll-interval", "0.2")
        )
        requests = crowd(2, NUM_STREAMS, plain=True)
        calm = asyncio.run(play(router.url, requests))
        results: list[StreamResult] = []
        is_over = False

        async def client(number: int) -> None:
            turns = itertools.cycle(range(number, NUM_STREAMS, 4))
            while not is_over:
                answer, turn = StreamResult(), next(turns)
                await asyncio.wait_for(listen(router.url, requests[turn], answer), _TIMEOUT_S)
                assert answer.bytes_of() == calm.results[turn].bytes_of(), "other bytes, or none"
                results.append(answer)

        async def rollout() -> None:
            nonlocal is_over
            try:
                new = await asyncio.to_thread(stack.enter_context, served(*pods.serve))
                list_file.write_text(f"{stays.url}\n{new.url}\n")
                await asyncio.sleep(pods.unlist_s)
                old.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.process.wait, pods.grace_s) == 0, "a drain that failed"
                await asyncio.sleep(1)
            finally:
                is_over = True

        async def clients_and_rollout() -> None:
            await asyncio.gather(rollout(), *(client(number) for number in range(4)))

        asyncio.run(clients_and_rollout())
        assert all(answer.num_connections == 1 for answer in results), "a client had to come back"

        async def kill() -> None:
            stays.process.kill()

        struck = asyncio.run(play(router.url, requests, kill))
        assert not differences(calm, struck, requests), "other bytes after the death of a server"
        assert all(answer.num_connections == 1 for answer in struck.results), "a client had to come back"
    return (
        f"no cluster, the commands of the chart's pods: a rollout under {len(results)} streamed requests: none failed, "
        f"longest wait {max(answer.longest_wait_s for answer in results):.2f} s; a whole server killed under {NUM_STREAMS}: "
        f"same bytes, longest wait {struck.longest_wait_s:.2f} s"
    )


def apart() -> str:
    """Prompts computed by one server and answered by another, with the router in front: either may lose its executor."""
    listen = f"127.0.0.1:{free_port()}"
    with (
        served("--role", "prefill", "--kv-peer-listen", listen) as prefill,
        served("--role", "decode") as decode,
        routed(
            *("--engine", prefill.url, "--engine", decode.url),
            "--poll-interval",
            "0.2",
            "--pd-min-tokens",
            "32",
        ) as router,
    ):
        wait_until(lambda: "prefill" in router.get("/servers")[1], "roles are known")
        wait_until(lambda: "decode" in router.get("/servers")[1], "roles are known")
        requests = crowd(3, NUM_STREAMS)
        calm = asyncio.run(asyncio.wait_for(play(router.url, requests), _TIMEOUT_S))
        waits_s = []
        for server in (prefill, decode):

            async def disturb(server: Server = server) -> None:
                server.children()["quintet-executor-0"].kill()

            struck = asyncio.run(asyncio.wait_for(play(router.url, requests, disturb), _TIMEOUT_S))
            assert not differences(calm, struck, requests), "other bytes after the death of an executor"
            waits_s.append(struck.longest_wait_s)
            wait_until(lambda server=server: server.get("/readyz")[0] == 200, "all processes ready")  # type: ignore[misc]
        decode.await_metrics()
        num_fetched = decode.gauge_of("quintet:kv_peer_blocks_total", "fetched")
        assert num_fetched > 0, "nothing went from one to the other"
    return (
        f"{num_fetched:.0f} blocks fetched; executors killed under {NUM_STREAMS} streams: same bytes, longest wait "
        f"{waits_s[0]:.2f} s (of the one that computes prompts), {waits_s[1]:.2f} s (of the one that answers)"
    )


PATHS: dict[str, Callable[[], str]] = {
    "one-box": one_box,
    "two-sockets": two_sockets,
    "gpus": gpus,
    "replicas": replicas,
    "apart": apart,
}


class Walk(msgspec.Struct, frozen=True):
    """One path, walked."""

    path: str
    as_promised: bool | None
    """None: not walked, as it says."""
    said: str


class Report(msgspec.Struct):
    """The file."""

    date: str
    commit: str
    machine: Machine
    walks: list[Walk]


def walk(name: str) -> Walk:
    """Walk a path and print what it says."""
    print(f"{name}:", flush=True)
    try:
        walked = Walk(name, True, PATHS[name]())
    except NotHere as error:
        walked = Walk(name, None, str(error))
    except (AssertionError, TimeoutError) as error:
        walked = Walk(name, False, f"NOT AS PROMISED: {error or 'no answer'}")
    print(f"  {walked.said}", flush=True)
    return walked


def main() -> int:
    """Walk the chosen paths."""
    parser = argparse.ArgumentParser(description="Walk the paths of docs/deploy.md.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(PATHS)} (default: all)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append what was found as JSON")
    arguments = parser.parse_args()
    chosen = arguments.paths or list(PATHS)
    if strange := [name for name in chosen if name not in PATHS]:
        parser.error(f"there is no path {strange[0]!r}; there are {', '.join(PATHS)}")
    walks = [walk(name) for name in chosen]
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), [])
        if arguments.save.exists():
            report = msgspec.json.decode(arguments.save.read_bytes(), type=Report)
        report.walks += walks
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 1 if any(each.as_promised is False for each in walks) else 0


if __name__ == "__main__":
    sys.exit(main())
