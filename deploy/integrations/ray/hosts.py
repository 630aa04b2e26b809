"""``python -m quintet.deploy.integrations.ray.hosts``: the driver that has Ray place the other hosts of a model while
the server lives.

A child of the first host, which writes its order to standard input and then only holds it open: its end is this process's,
however it comes. With the driver, however that ends, Ray ends the actors and gives the placement group back. An actor that ends,
alone or with its node, is followed by another.
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
from quintet.deploy.integrations.ray.host import Ended, Host
from quintet.deploy.integrations.ray.messages import Joined, Order, Refused, Report
from quintet.deploy.integrations.ray.resources import Node, processors_of
from quintet.deploy.supervisor.restarts import RestartPolicy
from quintet.process.log import configure_logging
from quintet.wire.errors import EXIT_CONFIG, ConfigError

ROOM_S = 30.0
"""So long the nodes may still have other things to do."""
LOOK_S = 1.0
LEAVE_S = 4.0
"""So long hosts may take to end with the server."""
NODE_ID = "ray.io/node-id"
"""A label that Ray gives every node."""

log = logging.getLogger("quintet")


class Reports:
    """The way to the first host. Lines are short enough to go out whole, whichever thread they are of."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, report: Report) -> None:
        """Write one line; nobody may be there any more."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, msgspec.json.encode(report) + b"\n")


def join() -> None:
    """Become a driver of the cluster that this node is of. Raises `ConfigError`."""
    try:
        ray.init(address="auto", logging_level="WARNING", log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        words = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"{BY_RAY}: no Ray cluster can be joined from here ({words}); start one with `ray start --head`, or join one with"
            " `ray start --address=HEAD:6379`, on this machine too, or say which by RAY_ADDRESS"
        ) from None


def nodes() -> list[Node]:
    """Return those that live."""
    return [
        Node(each["NodeID"], each["NodeManagerAddress"], int(each["Resources"].get("CPU", 0)))
        for each in ray.nodes()
        if each["Alive"]
    ]


def place(order: Order) -> tuple[PlacementGroup, list[int]]:
    """Reserve a node for each host, this one for the first, and return how many CPUs each has. Raises `ConfigError`."""
    own = ray.get_runtime_context().get_node_id()
    cpus = processors_of(nodes(), own, order.count, order.ranks_per_host, order.threads)
    bundles = [{"CPU": number} if number else {"memory": 1} for number in cpus]
    labels = [{NODE_ID: own}, *({} for _ in cpus[1:])]
    group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)
    if not group.wait(ROOM_S):
        free = ray.available_resources().get("CPU", 0.0)
        raise ConfigError(
            f"{BY_RAY}: {order.count} nodes with {', '.join(map(str, cpus))} free CPUs, this one first, were not to be had within"
            f" {ROOM_S:g} s; {free:g} CPUs of the cluster are free: end what has the others, or lower --threads"
        )
    return group, cpus


class Keeper:
    """Has one actor after another be a host, in a thread of its own."""

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
        # Two calls at a time: one is the host's life, the other ends it.
        self._actors = ray.remote(Host).options(
            num_cpus=cpus, scheduling_strategy=strategy, max_restarts=0, max_concurrency=2
        )
        self._actor = self._actors.remote()
        self._is_leaving = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"host-{host}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Have the host end, so that it removes what it was given: an actor's processes are killed with it."""
        self._is_leaving.set()
        self._actor.end.remote()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, but no longer."""
        self._thread.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether Ray itself failed it: a driver made anew may fare better."""
        return not self._thread.is_alive()

    def _keep(self) -> None:
        deaths: deque[float] = deque()
        while not self._is_leaving.is_set():
            self._be_host()
            ray.kill(self._actor)
            if not self._is_leaving.wait(RestartPolicy().pause_s(deaths, time.monotonic())):
                self._actor = self._actors.remote()

    def _be_host(self) -> None:
        """Return when the actor, or the host in it, has ended."""
        host = self._host
        try:
            log.info("host %d is placed on %s", host, ray.get(self._actor.address.remote()))
            ended = ray.get(self._actor.run.remote(self._flags, self._key))
        except (RayActorError, RayTaskError) as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                log.warning("host %d: its actor ended (%s); placing it again", host, type(error).__name__)
                return
            words = str(error).strip().splitlines()[-1][:500]
            self._reports.tell(
                Refused(
                    f"host {host}: its node cannot run it ({words}); every node needs the same: pip install 'quintet[ray]'"
                )
            )
        else:
            if not self._is_leaving.is_set():
                _say(host, ended, self._reports)


def _say(host: int, ended: Ended, reports: Reports) -> None:
    """Tell of a host that ended by itself: what it says of the configuration is the first host's matter."""
    if ended.status == EXIT_CONFIG:
        reports.tell(Refused(f"host {host}, on {ended.address}: {ended.words[:1000]}"))
    else:
        log.warning(
            "host %d, on %s, ended with status %d; placing it again", host, ended.address, ended.status
        )


def _listen(orders: queue.SimpleQueue[Order], is_alone: threading.Event) -> None:
    """Hand on the order that comes, and see to this process's end, whatever else it waits for, once nothing can come any more."""
    with open(
        sys.stdin.fileno(), "rb", buffering=0
    ) as pipe:  # a buffer's lock would be held when this process ends otherwise
        if line := pipe.readline():
            orders.put(msgspec.json.decode(line, type=Order))
            pipe.read()
    is_alone.set()
    time.sleep(LEAVE_S)
    os._exit(0)


def main() -> int:
    """Join, report, place what is ordered and keep it."""
    parser = argparse.ArgumentParser(
        prog="python -m quintet.deploy.integrations.ray.hosts", description=__doc__
    )
    parser.add_argument(
        "--report-fd", type=int, required=True, help="where lines about the hosts are written"
    )
    reports = Reports(parser.parse_args().report_fd)
    # Ray writes to standard output what actors log; there the server tells its story.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setproctitle.setproctitle("quintet-ray")
    configure_logging("ray", "INFO")
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    is_alone = threading.Event()
    threading.Thread(target=_listen, args=(orders, is_alone), name="listen", daemon=True).start()
    try:
        join()
        reports.tell(Joined(str(ray.util.get_node_ip_address())))
        order = orders.get()
        configure_logging("ray", order.log_level)
        group, cpus = place(order)
    except ConfigError as error:
        reports.tell(Refused(str(error)))
        return EXIT_CONFIG
    keepers = [Keeper(host, cpus[host], group, order, reports) for host in range(1, order.count)]
    own = ray.get_runtime_context().get_node_id()
    while not is_alone.wait(LOOK_S):
        if own not in {node.node_id for node in nodes()}:
            log.warning("this node is not of the Ray cluster any more")
            return 1
        if any(keeper.has_failed for keeper in keepers):
            return 1
    for keeper in keepers:
        keeper.leave()
    for keeper in keepers:
        keeper.join(LEAVE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
