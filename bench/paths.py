"""Test the deployment paths of docs/deploy.md: start the processes, stream requests, kill or replace a process, and drain.

    python -m bench.paths [one-machine two-sockets gpus replicas disaggregated] [--save FILE]

Prints the commands of each path, the checks that it passed, and the longest wait of a client for an event. Commands have flags
for less memory and fewer log lines (`FLAGS`). Hardware that this machine lacks is named: sockets, GPUs, a cluster. Exit status 1
when a check fails.
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

from bench.chaos.streams import StreamResult, differences, random_requests, run_requests, stream_request
from bench.overhead.run import Machine, _commit, machine
from quintet.deploy.config.device import default_device, num_gpus
from quintet.executor.backends.platforms.cores import nodes_of

MANIFESTS = Path(__file__).parents[1] / "deploy" / "integrations" / "kubernetes"
FLAGS = ("--kv-cache-memory", "64MiB", "--log-level", "WARNING")
NUM_STREAMS = 16
_TIMEOUT_S = 60.0


class MissingHardware(Exception):
    """The machine lacks hardware of a deployment path."""


def kill_under_load(server: Server, victim: str) -> str:
    """Kill a process while requests stream; return a summary. Asserts that all bytes equal those of an undisturbed run."""
    requests = random_requests(1, NUM_STREAMS)
    undisturbed = asyncio.run(run_requests(server.url, requests))

    async def disturb() -> None:
        server.children()[victim].kill()

    disturbed = asyncio.run(run_requests(server.url, requests, disturb))
    assert not differences(undisturbed, disturbed, requests), f"different bytes after a kill of {victim}"
    wait_until(lambda: server.get("/health")[0] == 200, "all processes ready")
    return f"{victim} killed under {NUM_STREAMS} streams: same bytes, longest wait {disturbed.longest_wait_s:.2f} s"


@contextmanager
def serve_packaged(*flags: str) -> Iterator[Server]:
    """Serve the packaged model with the given command."""
    with serve(*FLAGS, *flags) as server:
        print_command("quintet", "serve", *FLAGS, *flags)
        yield server


@contextmanager
def start_router(*flags: str) -> Iterator[Server]:
    """Run a router with the given command."""
    with route(*flags) as router:
        print_command("quintet", "route", *flags)
        yield router


def print_command(*words: str) -> None:
    """Print a command as a user would type it."""
    print(f"  $ {shlex.join(words)}", flush=True)


def one_machine() -> str:
    """`quintet serve`: a killed executor does not change responses; the server drains."""
    with serve_packaged() as server:
        summary = kill_under_load(server, "quintet-executor-0")
        assert server.stop() == 0, "the drain failed"
    return f"{summary}; drained"


def two_sockets() -> str:
    """`--data-parallel-size 2`: both engines generate tokens, and one core is killed. `--tensor-parallel-size 2`: one rank is."""
    with serve_packaged("--data-parallel-size", "2") as server:
        check_engines(server, 2)
        engines = kill_under_load(server, "quintet-core-1")
        assert server.stop() == 0, "the drain failed"
    with serve_packaged("--tensor-parallel-size", "2") as server:
        ranks = kill_under_load(server, "quintet-executor-0-rank-1")
        assert server.stop() == 0, "the drain failed"
    num_nodes = len(set(nodes_of(os.sched_getaffinity(0)).values()))
    return f"both engines generated tokens; {engines}; drained; two ranks: {ranks}; drained; {num_nodes} NUMA node(s)"


def check_engines(server: Server, count: int) -> None:
    """Check that every engine generates tokens. Call it before a kill: a killed engine loses the counts not yet reported."""
    asyncio.run(run_requests(server.url, random_requests(1, NUM_STREAMS)))
    server.await_metrics()
    _, figures = server.get("/metrics")
    for engine in range(count):
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in figures.splitlines()
            if line.startswith("quintet:generation_tokens_total{") and f'index="{engine}"' in line
        ]
        assert sum(counts) > 0, f"engine {engine} generated no token"


def gpus() -> str:
    """`quintet serve --data-parallel-size N` on N GPUs, one engine on each; one executor is killed."""
    count = num_gpus(os.environ) or 0
    if default_device() != "cuda" or count < 2:
        command = "quintet serve MODEL --data-parallel-size N"
        raise MissingHardware(f"not tested: `{command}` needs 2 GPUs or more; found {count} (docs/gpu.md)")
    with serve_packaged("--data-parallel-size", str(count)) as server:
        check_engines(server, count)
        summary = kill_under_load(server, "quintet-executor-0")
        assert server.stop() == 0, "the drain failed"
    return f"{count} engines generated tokens; {summary}; drained"


@dataclass(frozen=True, slots=True)
class Pods:
    """Settings of the chart's pods."""

    serve: tuple[str, ...]
    """Flags of a server."""
    route: tuple[str, ...]
    """Flags of the router."""
    pre_stop_s: float
    """Time between the removal from the router's list and SIGTERM."""
    grace_period_s: float
    """Time between SIGTERM and SIGKILL."""


_POD_FLAGS = ("--host=", "--port=", "--engine-dns=", "--api-key=", "--engine-api-key=")
"""Flags that are valid only in a pod."""


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
            if not word.startswith(_POD_FLAGS)
        )
        for name, pod in pods.items()
    }
    pod = pods["quintet"]
    pre_stop_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_period_s = float(pod["terminationGracePeriodSeconds"]) - pre_stop_s
    return Pods(flags["quintet"], flags["quintet-router"], pre_stop_s, grace_period_s)


def replicas() -> str:
    """The chart's pods with a router: a rollout under streamed requests, then a kill of a server."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        pods, list_file = _pods(Path(folder)), Path(folder) / "servers"
        old, kept = (stack.enter_context(serve_packaged(*pods.serve)) for _ in range(2))
        list_file.write_text(f"{old.url}\n{kept.url}\n")
        router = stack.enter_context(
            start_router(*pods.route, "--engines", str(list_file), "--poll-interval", "0.2")
        )
        requests = random_requests(2, NUM_STREAMS, plain=True)
        undisturbed = asyncio.run(run_requests(router.url, requests))
        results: list[StreamResult] = []
        is_over = False

        async def client(number: int) -> None:
            indices = itertools.cycle(range(number, NUM_STREAMS, 4))
            while not is_over:
                result, index = StreamResult(), next(indices)
                await asyncio.wait_for(stream_request(router.url, requests[index], result), _TIMEOUT_S)
                assert result.bytes_of() == undisturbed.results[index].bytes_of(), "different bytes"
                results.append(result)

        async def rollout() -> None:
            nonlocal is_over
            try:
                new = await asyncio.to_thread(stack.enter_context, serve_packaged(*pods.serve))
                list_file.write_text(f"{kept.url}\n{new.url}\n")
                await asyncio.sleep(pods.pre_stop_s)
                old.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.process.wait, pods.grace_period_s) == 0, "the drain failed"
                await asyncio.sleep(1)
            finally:
                is_over = True

        async def clients_and_rollout() -> None:
            await asyncio.gather(rollout(), *(client(number) for number in range(4)))

        asyncio.run(clients_and_rollout())
        assert all(result.num_connections == 1 for result in results), "a client had to reconnect"

        async def kill() -> None:
            kept.process.kill()

        disturbed = asyncio.run(run_requests(router.url, requests, kill))
        assert not differences(undisturbed, disturbed, requests), "different bytes after a kill of a server"
        assert all(result.num_connections == 1 for result in disturbed.results), "a client had to reconnect"
    return (
        f"commands of the chart's pods, without a cluster: rollout under {len(results)} streamed requests, none failed, "
        f"longest wait {max(result.longest_wait_s for result in results):.2f} s; server killed under {NUM_STREAMS} streams: "
        f"same bytes, longest wait {disturbed.longest_wait_s:.2f} s"
    )


def disaggregated() -> str:
    """A prefill server and a decode server behind a router: the executor of each is killed."""
    peer_address = f"127.0.0.1:{free_port()}"
    with (
        serve_packaged("--role", "prefill", "--kv-peer-listen", peer_address) as prefill,
        serve_packaged("--role", "decode") as decode,
        start_router(
            *("--engine", prefill.url, "--engine", decode.url),
            "--poll-interval",
            "0.2",
            "--pd-min-tokens",
            "32",
        ) as router,
    ):
        wait_until(lambda: "prefill" in router.get("/servers")[1], "roles are known")
        wait_until(lambda: "decode" in router.get("/servers")[1], "roles are known")
        requests = random_requests(3, NUM_STREAMS)
        undisturbed = asyncio.run(asyncio.wait_for(run_requests(router.url, requests), _TIMEOUT_S))
        waits_s = []
        for server in (prefill, decode):

            async def disturb(server: Server = server) -> None:
                server.children()["quintet-executor-0"].kill()

            disturbed = asyncio.run(asyncio.wait_for(run_requests(router.url, requests, disturb), _TIMEOUT_S))
            assert not differences(undisturbed, disturbed, requests), (
                "different bytes after a kill of an executor"
            )
            waits_s.append(disturbed.longest_wait_s)
            wait_until(lambda server=server: server.get("/readyz")[0] == 200, "all processes ready")  # type: ignore[misc]
        decode.await_metrics()
        num_fetched = decode.gauge_of("quintet:kv_peer_blocks_total", "fetched")
        assert num_fetched > 0, "the decode server fetched no block"
    return (
        f"{num_fetched:.0f} blocks fetched; executors killed under {NUM_STREAMS} streams: same bytes, longest wait "
        f"{waits_s[0]:.2f} s (prefill server), {waits_s[1]:.2f} s (decode server)"
    )


PATHS: dict[str, Callable[[], str]] = {
    "one-machine": one_machine,
    "two-sockets": two_sockets,
    "gpus": gpus,
    "replicas": replicas,
    "disaggregated": disaggregated,
}


class PathResult(msgspec.Struct, frozen=True):
    """Result of one deployment path."""

    path: str
    passed: bool | None
    """None: not tested, for the reason in ``message``."""
    message: str


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    results: list[PathResult]


def run_path(name: str) -> PathResult:
    """Test a deployment path and print the result."""
    print(f"{name}:", flush=True)
    try:
        result = PathResult(name, True, PATHS[name]())
    except MissingHardware as error:
        result = PathResult(name, None, str(error))
    except (AssertionError, TimeoutError) as error:
        result = PathResult(name, False, f"FAILED: {error or 'no response'}")
    print(f"  {result.message}", flush=True)
    return result


def main() -> int:
    """Test the given paths, or all."""
    parser = argparse.ArgumentParser(description="Test the deployment paths of docs/deploy.md.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"one of {', '.join(PATHS)} (default: all)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append the results to a JSON file")
    arguments = parser.parse_args()
    chosen = arguments.paths or list(PATHS)
    if unknown := [name for name in chosen if name not in PATHS]:
        parser.error(f"unknown path {unknown[0]!r}; allowed: {', '.join(PATHS)}")
    results = [run_path(name) for name in chosen]
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), [])
        if arguments.save.exists():
            report = msgspec.json.decode(arguments.save.read_bytes(), type=Report)
        report.results += results
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 1 if any(result.passed is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
