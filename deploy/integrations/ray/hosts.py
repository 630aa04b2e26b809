"""``python -m quintet.deploy.integrations.ray.hosts``: Ray driver that places the worker hosts of a multi-host model.

A child process of host 0, which writes the order to standard input and keeps it open; end of file stops the driver.
When the driver ends, Ray removes its actors and placement group. A failed actor is replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque

import msgspec
import ray
import setproctitle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quintet.deploy.config.hosts import BY_RAY
from quintet.deploy.integrations.ray.cluster import Joined, Node, Order, Refused, Report, processors_of
from quintet.deploy.integrations.ray.host import Ended, Host
from quintet.deploy.supervisor.restarts import RestartPolicy
from quintet.process.log import configure_logging
from quintet.wire.errors import EXIT_CONFIG, ConfigError

PLACEMENT_TIMEOUT_S = 30.0
"""Timeout for free resources on the nodes."""
CHECK_INTERVAL_S = 1.0
STOP_S = 4.0
"""Time that hosts may take to stop with the server."""
NODE_ID = "ray.io/node-id"
"""Ray's node label of the node id."""

log = logging.getLogger("quintet")


class Reports:
    """Pipe to host 0. Lines are short enough for atomic writes from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, report: Report) -> None:
        """Write one line; ignore a closed pipe."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, msgspec.json.encode(report) + b"\n")


def join() -> None:
    """Connect to the node's Ray cluster as a driver. Raises `ConfigError`."""
    try:
        ray.init(address="auto", logging_level="WARNING", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"{BY_RAY}: cannot connect to a Ray cluster ({reason}); start one with `ray start --head`, join one with"
            " `ray start --address=HEAD:6379` on this machine, or set RAY_ADDRESS"
        ) from None


def nodes() -> list[Node]:
    return [
        Node(each["NodeID"], each["NodeManagerAddress"], int(each["Resources"].get("CPU", 0)))
        for each in ray.nodes()
        if each["Alive"]
    ]


def place(order: Order) -> tuple[PlacementGroup, list[int]]:
    """Reserve a node for each host, this one for host 0; return the group and CPUs per host. Raises `ConfigError`."""
    own = ray.get_runtime_context().get_node_id()
    cpus = processors_of(nodes(), own, order.count, order.ranks_per_host, order.threads)
    bundles = [{"CPU": number} if number else {"memory": 1} for number in cpus]
    labels = [{NODE_ID: own}, *({} for _ in cpus[1:])]
    group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)
    if not group.wait(PLACEMENT_TIMEOUT_S):
        free = ray.available_resources().get("CPU", 0.0)
        raise ConfigError(
            f"{BY_RAY}: no {order.count} nodes with {', '.join(map(str, cpus))} free CPUs, this one first, within"
            f" {PLACEMENT_TIMEOUT_S:g} s; {free:g} CPUs of the cluster are free: stop other jobs, or lower --threads"
        )
    return group, cpus


class HostRunner:
    """Runs the actor of one host in a thread, and replaces it when it fails."""

    def __init__(self, host: int, cpus: int, group: PlacementGroup, order: Order, reports: Reports) -> None:
        self._host, self._key, self._reports = host, order.key, reports
        self._flags = {
            **order.flags,
            "headless": True,
            "node_rank": host,
            "master_addr": order.address,
            "threads": max(1, cpus // order.ranks_per_host),
        }
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=host)
        # Two concurrent calls: `run`, and `end`, which stops it.
        self._actors = ray.remote(Host).options(
            num_cpus=cpus, scheduling_strategy=strategy, max_restarts=0, max_concurrency=2
        )
        self._actor = self._actors.remote()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"host-{host}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the host, so that it removes its files before Ray kills the actor."""
        self._is_stopping.set()
        self._actor.end.remote()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, at most ``timeout_s``."""
        self._thread.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """True if the thread ended by an error of Ray, so that a new driver is needed."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        deaths: deque[float] = deque()
        while not self._is_stopping.is_set():
            self._run_actor()
            ray.kill(self._actor)
            if not self._is_stopping.wait(RestartPolicy().pause_s(deaths, time.monotonic())):
                self._actor = self._actors.remote()

    def _run_actor(self) -> None:
        """Run the host in the actor; return when either has ended."""
        host = self._host
        try:
            log.info("host %d is placed on %s", host, ray.get(self._actor.address.remote()))
            ended = ray.get(self._actor.run.remote(self._flags, self._key))
        except (RayActorError, RayTaskError) as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                log.warning("host %d: actor failed (%s); placing it again", host, type(error).__name__)
                return
            reason = str(error).strip().splitlines()[-1][:500]
            self._reports.send(
                Refused(
                    f"host {host}: its node cannot run it ({reason}); install the same packages on every node: pip install"
                    " 'quintet[ray]'"
                )
            )
        else:
            if not self._is_stopping.is_set():
                _report_exit(host, ended, self._reports)


def _report_exit(host: int, ended: Ended, reports: Reports) -> None:
    """Log the exit of a host, or report its configuration error to host 0."""
    if ended.status == EXIT_CONFIG:
        reports.send(Refused(f"host {host}, on {ended.address}: {ended.words[:1000]}"))
    else:
        log.warning(
            "host %d on %s exited with status %d; placing it again", host, ended.address, ended.status
        )


def _listen(orders: queue.SimpleQueue[Order], is_orphaned: threading.Event) -> None:
    """Forward the order, and end the process at end of file of standard input, even if it is blocked elsewhere."""
    with open(
        sys.stdin.fileno(), "rb", buffering=0
    ) as pipe:  # a buffer's lock would be held when this process ends otherwise
        if line := pipe.readline():
            orders.put(msgspec.json.decode(line, type=Order))
            pipe.read()
    is_orphaned.set()
    time.sleep(STOP_S)
    os._exit(0)


def main() -> int:
    """Connect to Ray, report, place the ordered hosts and keep them running."""
    parser = argparse.ArgumentParser(
        prog="python -m quintet.deploy.integrations.ray.hosts", description=__doc__
    )
    parser.add_argument("--report-fd", type=int, required=True, help="pipe for reports to host 0")
    reports = Reports(parser.parse_args().report_fd)
    # Ray writes actor logs to standard output, which the server uses for its startup log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setproctitle.setproctitle("quintet-ray")
    configure_logging("ray", "INFO")
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    is_orphaned = threading.Event()
    threading.Thread(target=_listen, args=(orders, is_orphaned), name="listen", daemon=True).start()
    try:
        join()
        reports.send(Joined(str(ray.util.get_node_ip_address())))
        order = orders.get()
        configure_logging("ray", order.log_level)
        group, cpus = place(order)
    except ConfigError as error:
        reports.send(Refused(str(error)))
        return EXIT_CONFIG
    runners = [HostRunner(host, cpus[host], group, order, reports) for host in range(1, order.count)]
    own = ray.get_runtime_context().get_node_id()
    while not is_orphaned.wait(CHECK_INTERVAL_S):
        if own not in {node.node_id for node in nodes()}:
            log.warning("this node has left the Ray cluster")
            return 1
        if any(runner.has_failed for runner in runners):
            return 1
    for runner in runners:
        runner.stop()
    for runner in runners:
        runner.join(STOP_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
