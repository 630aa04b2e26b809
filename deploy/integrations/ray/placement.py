"""Host 0's side of Ray placement: starts the driver, sends it the order, and restarts it when it fails.

    server ── order, and its own life ──▶ driver ── Ray ──▶ an actor on each other node ──▶ quintet serve --headless
           ◀──────── reports ───────────  (`quintet.deploy.integrations.ray.hosts`)

The server's processes do not import Ray.
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
from quintet.deploy.integrations.ray.cluster import Joined, Order, Refused, Report
from quintet.deploy.supervisor.restarts import RestartPolicy
from quintet.deploy.supervisor.startup_log import Failure
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError

COMMAND = (sys.executable, "-P", "-m", "quintet.deploy.integrations.ray.hosts")
CONNECT_S, JOIN_S, END_S = 5.0, 120.0, 10.0
_COPIED_FLAGS = (
    "nnodes", "pipeline_parallel_size", "tensor_parallel_size", "master_port", "load_format", "trust_remote_code", "log_level",
)  # fmt: skip
"""Flags copied from host 0 to the other hosts."""


class Driver:
    """The driver process, which ends when its standard input is closed."""

    def __init__(self, command: Sequence[str]) -> None:
        self._reports, written = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--report-fd", str(written)],
                stdin=subprocess.PIPE,
                pass_fds=[written],
                process_group=0,  # a terminal sends Ctrl-C to the server only, which drains
            )
        finally:
            os.close(written)
        self._partial_line = b""

    def receive(self, timeout_s: float = 0.0) -> list[Report] | None:
        """Return new reports, waiting at most ``timeout_s`` for the first; None after the driver has ended."""
        if not select.select([self._reports], [], [], timeout_s)[0]:
            return []
        read = os.read(self._reports, 1 << 16)
        if not read:
            return None
        *lines, self._partial_line = (self._partial_line + read).split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    def send(self, order: Order) -> None:
        """Write the order; `receive` reports a driver that has ended meanwhile."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def end(self) -> int:
        """Stop the driver and its hosts; return the exit status."""
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
    """Keeps a driver running. Used in the supervisor's thread only."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._driver: Driver | None = Driver(command)
        self._order: Order | None = None
        self._refusal = ""
        """Last reported configuration error."""
        self._deaths: deque[float] = deque()
        self._restart_at_s = 0.0

    def join(self, timeout_s: float) -> str:
        """Wait until the driver has joined the cluster; return this node's Ray address. Raises `ConfigError`."""
        assert self._driver is not None
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            reports = self._driver.receive(left_s)
            if reports is None:
                raise ConfigError(f"{BY_RAY}: {self._ended(self._driver)}; see the log above")
            for report in reports:
                if isinstance(report, Joined):
                    return report.address
                raise ConfigError(report.words)
        raise ConfigError(f"{BY_RAY}: no response from the Ray cluster within {timeout_s:g} s")

    def place(self, order: Order) -> None:
        """Place the hosts, with this driver and its replacements."""
        assert self._driver is not None
        self._order = order
        self._driver.send(order)

    def look(self, now: float) -> Failure | None:
        """Process reports, and restart a failed driver. Return each new failure once."""
        if self._driver is None:
            if now >= self._restart_at_s:
                self._driver = Driver(self._command)
            return None
        reports = self._driver.receive()
        if reports is None:
            return self._restart_later(self._driver, now)
        failure = None
        for report in reports:
            match report:
                case Joined() if self._order is not None:
                    self._refusal = ""
                    self._driver.send(self._order)
                case Refused(words=words) if words != self._refusal:
                    self._refusal = words
                    failure = Failure("ray", words, "", EXIT_CONFIG)
        return failure

    def _restart_later(self, driver: Driver, now: float) -> Failure | None:
        self._restart_at_s = now + RestartPolicy().pause_s(self._deaths, now)
        message = f"{self._ended(driver)}, and the other hosts with it"
        return None if self._refusal else Failure("ray", message, "", 1)

    def _ended(self, driver: Driver) -> str:
        """Release an ended driver; return a description of its exit."""
        self._driver = None
        return f"the Ray driver exited with status {driver.end()}"

    def close(self) -> None:
        if self._driver is not None:
            self._driver.end()


@contextlib.contextmanager
def placed_hosts(options: Options, config: EngineConfig) -> Iterator[tuple[EngineConfig, PlacedHosts]]:
    """Place the other hosts with Ray; yield the configuration with host 0's address, and the placed hosts.

    options: as given. config: resolved, with a group key. Raises `ConfigError`.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{BY_RAY} requires the package ray on every node: pip install 'quintet[ray]'")
    check_cluster_address(os.environ.get("RAY_ADDRESS", ""))
    hosts = PlacedHosts()
    try:
        own_address = hosts.join(min(JOIN_S, options.boot_timeout))
        address = own_address if options.master_addr is None else options.master_addr
        replace, executor = msgspec.structs.replace, config.executor
        assert executor.hosts is not None, "Ray backend without several hosts"
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
    """Check ``RAY_ADDRESS`` early, because Ray retries for minutes. Raises `ConfigError`."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{BY_RAY} with RAY_ADDRESS={address}: Ray clients are not supported; run this command on a node of the cluster,"
            " and unset RAY_ADDRESS or set it to HEAD:6379"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{BY_RAY} with RAY_ADDRESS={address}: cannot connect to a Ray cluster ({error}); start one with"
            " `ray start --head`, or set another address"
        ) from None


def flags_of_others(options: Options) -> dict[str, str | int | bool]:
    """Return the common flags of the other hosts. Folders must have the same path on all hosts."""
    flags = {name: getattr(options, name) for name in _COPIED_FLAGS}
    if options.model is not None:
        path = Path(options.model).expanduser()
        flags["model"] = str(path.absolute()) if path.exists() else options.model
    packed_cache = folder_of(options.packed_cache)
    if packed_cache is not None:
        flags["packed_cache"] = packed_cache
    if options.revision is not None:
        flags["revision"] = options.revision
    return flags
