"""The first host's side of hosts that Ray places: starts the driver, says what to place, and starts another where it ended.

    server ── order, and its own life ──▶ driver ── Ray ──▶ an actor on each other node ──▶ quintet serve --headless
           ◀──────── reports ───────────  (`quintet.deploy.integrations.ray.hosts`)

The server's own processes know nothing of Ray, and load nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import BY_RAY, address_of
from quintet.deploy.config.sections import folder_of
from quintet.deploy.integrations.ray.messages import Joined, Order, Refused, Report
from quintet.deploy.supervisor.restarts import RestartPolicy
from quintet.deploy.supervisor.startup_log import Failure
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError

COMMAND = (sys.executable, "-P", "-m", "quintet.deploy.integrations.ray.hosts")
KNOCK_S, JOIN_S, END_S = 5.0, 120.0, 10.0
_IN_COMMON = (
    "nnodes", "pipeline_parallel_size", "tensor_parallel_size", "master_port", "load_format", "trust_remote_code", "log_level",
)  # fmt: skip
"""Flags that the other hosts have as the first has them."""


class Driver:
    """One process that talks with Ray, and ends with the pipe to its standard input."""

    def __init__(self, command: Sequence[str]) -> None:
        self._reports, written = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--report-fd", str(written)],
                stdin=subprocess.PIPE,
                pass_fds=[written],
                process_group=0,  # a terminal's Ctrl-C is for the server, which drains
            )
        finally:
            os.close(written)
        self._begun = b""
        """Of a line."""

    def heard(self, timeout_s: float = 0.0) -> list[Report] | None:
        """Return what it has reported since the last call, waiting for the first; None once it has ended and said everything."""
        if not select.select([self._reports], [], [], timeout_s)[0]:
            return []
        read = os.read(self._reports, 1 << 16)
        if not read:
            return None
        *lines, self._begun = (self._begun + read).split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    def tell(self, order: Order) -> None:
        """Write the order; whoever has ended meanwhile is seen to have."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def end(self) -> int:
        """End it, and with it whatever it has placed; return the exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            os.close(self._reports)


class PlacedHosts:
    """Keeps a driver. Used in one thread, the supervisor's."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._driver: Driver | None = Driver(command)
        self._order: Order | None = None
        self._words = ""
        """Said last, of why it cannot be."""
        self._deaths: deque[float] = deque()
        self._again_s = 0.0

    def join(self, timeout_s: float) -> str:
        """Wait until the driver is of the cluster, and return this node's address there. Raises `ConfigError`."""
        assert self._driver is not None
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            reports = self._driver.heard(left_s)
            if reports is None:
                raise ConfigError(f"{BY_RAY}: {self._ended(self._driver)}; the log above says more")
            for report in reports:
                if isinstance(report, Joined):
                    return report.address
                raise ConfigError(report.words)
        raise ConfigError(f"{BY_RAY}: the Ray cluster has not answered within {timeout_s:g} s")

    def place(self, order: Order) -> None:
        """Have the hosts placed, by this driver and those that follow it."""
        assert self._driver is not None
        self._order = order
        self._driver.tell(order)

    def look(self, now: float) -> Failure | None:
        """Hear the driver, and see to it that there is one. Return why hosts cannot be, once."""
        if self._driver is None:
            if now >= self._again_s:
                self._driver = Driver(self._command)
            return None
        reports = self._driver.heard()
        if reports is None:
            return self._lost(self._driver, now)
        failure = None
        for report in reports:
            match report:
                case Joined() if self._order is not None:
                    self._words = ""
                    self._driver.tell(self._order)
                case Refused(words=words) if words != self._words:
                    self._words = words
                    failure = Failure("ray", words, "", EXIT_CONFIG)
        return failure

    def _lost(self, driver: Driver, now: float) -> Failure | None:
        """Plan another driver."""
        self._again_s = now + RestartPolicy().pause_s(self._deaths, now)
        words = f"{self._ended(driver)}, and the other hosts with it"
        return None if self._words else Failure("ray", words, "", 1)

    def _ended(self, driver: Driver) -> str:
        """Take leave of a driver that has said everything; return how it ended, in words."""
        self._driver = None
        return f"the process that talks with Ray ended with status {driver.end()}"

    def close(self) -> None:
        """End the driver, and with it the other hosts."""
        if self._driver is not None:
            self._driver.end()


@contextlib.contextmanager
def placed_hosts(options: Options, config: EngineConfig) -> Iterator[tuple[EngineConfig, PlacedHosts]]:
    """Have Ray place the other hosts while the context lasts; yield the configuration with the address where they ask.

    options: as given. config: what was resolved of them, with a key. Raises `ConfigError`.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{BY_RAY}: there is no package ray here; pip install 'quintet[ray]', on every node"
        )
    check_cluster_address(os.environ.get("RAY_ADDRESS", ""))
    hosts = PlacedHosts()
    try:
        own_address = hosts.join(min(JOIN_S, options.boot_timeout))
        address = own_address if options.master_addr is None else options.master_addr
        replace, executor = msgspec.structs.replace, config.executor
        assert executor.hosts is not None, "hosts of a model on one"
        placed = replace(executor.hosts, address=address_of(address, options.master_port))
        hosts.place(
            Order(
                count=options.nnodes,
                ranks_per_host=executor.ranks_per_host,
                threads=options.threads,
                address=address,
                key=Path(placed.key_file).read_bytes(),
                flags=flags_of_others(options),
                log_level=options.log_level,
            )
        )
        yield replace(config, executor=replace(executor, hosts=placed)), hosts
    finally:
        hosts.close()


def check_cluster_address(address: str) -> None:
    """Reject one where no node of a cluster can be: Ray itself tries for minutes."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{BY_RAY} with RAY_ADDRESS={address}: the first host is a node of the cluster itself, not a client from afar; run"
            " this on a node, and unset RAY_ADDRESS or give HEAD:6379"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{BY_RAY} with RAY_ADDRESS={address}: no Ray cluster is there ({error}); start one with `ray start --head`, or name"
            " another"
        ) from None


def flags_of_others(options: Options) -> dict[str, str | int | bool]:
    """Return the flags that the other hosts have in common. A folder is the same path there as here."""
    flags = {name: getattr(options, name) for name in _IN_COMMON}
    if options.model is not None:
        path = Path(options.model).expanduser()
        flags["model"] = str(path.absolute()) if path.exists() else options.model
    packed_cache = folder_of(options.packed_cache)
    if packed_cache is not None:
        flags["packed_cache"] = packed_cache
    return flags
