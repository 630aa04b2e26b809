"""Endpoint picker decisions without a gateway; `tests/clients/platforms/gateway_picker.py` acts as one."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence

import pytest

from quintet.deploy.cli.route import _check, add_parser
from quintet.deploy.router import request_summary
from quintet.deploy.router.app import OPEN_PATHS, AccessPolicy
from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.server_choice import Picker, RequestHead, by_address
from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import DnsServers, Pulse, Watch
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.wire.errors import ConfigError, ErrorCode, RequestError

URLS = ("http://10.0.0.5:8000", "http://[fd00::5]:8000")
ENDPOINTS = ("10.0.0.5:8000", "[fd00::5]:8000")
C = "/v1/completions"


def picker(keys: Sequence[str] = (), per_key: tuple[int, int] = (0, 0), max_bytes: int = 1 << 20) -> Picker:
    """Return a picker with two healthy servers."""
    servers = Servers("prefix")
    servers.set_urls(URLS, 1.0)
    for server in servers:
        server.set_trouble("")
    limits = Limits(*per_key, time.monotonic)
    access_policy = AccessPolicy(Keys(keys, OPEN_PATHS.__contains__), limits, BodyBuffers(max_bytes), "")
    return Picker(servers, RouterMetrics(servers), access_policy)


def prompt(text: str) -> bytes:
    return b'{"prompt":"%b"}' % (text.encode() * 400)


def test_prefix_affinity_then_least_load() -> None:
    choices = picker()
    homes: dict[str, str] = {}
    for text in ("one story ", "another tale "):
        visit = choices.admit(RequestHead(C, {}))
        for piece in (prompt(text)[:100], prompt(text)[100:]):
            visit.take(piece)
        homes[text] = visit.pick()
        assert visit.body() == prompt(text)
        visit.begin()
    assert sorted(homes.values()) == sorted(ENDPOINTS)
    for text in [*homes, *homes]:
        visit = choices.admit(RequestHead(C, {}))
        visit.take(prompt(text))
        assert visit.pick() == homes[text]
        visit.release()


def test_models_share_no_prefixes() -> None:
    """A server may serve several adapters of a model under names of their own; their KV blocks differ."""
    a, b = (b'{"model":"%b",' % name + prompt("one story ")[1:] for name in (b"a", b"b"))
    first, *others = (request_summary.read(body, "").names for body in (a, a, b))
    assert others[0] == first != [] and not set(first) & set(others[1])


def test_request_counts_until_it_ends() -> None:
    choices = picker()
    visit = choices.admit(RequestHead(C, {}))
    visit.take(prompt("a story "))
    endpoint = visit.pick()
    server = list(choices.servers)[ENDPOINTS.index(endpoint)]
    assert (choices.num_open, server.num_open) == (1, 1) and server.num_queued > 0
    assert choices.policy.bodies.num_retained_bytes == len(prompt("a story "))
    visit.begin()
    assert (server.num_open, server.num_queued) == (1, 0)
    visit.release()
    assert (choices.num_open, server.num_open, choices.policy.bodies.num_retained_bytes) == (0, 0, 0)


def test_rejection_does_not_measure_ttft() -> None:
    noted = []
    for status in (200, 503):
        choices = picker()
        visit = choices.admit(RequestHead(C, {}))
        visit.take(b'{"stream":true,' + prompt("a story ")[1:])
        server = list(choices.servers)[ENDPOINTS.index(visit.pick())]
        server.speed.note = lambda *measured: noted.append(measured)  # type: ignore[method-assign]
        visit.answered(status)
        visit.begin()
    assert len(noted) == 1


def test_choice_is_among_the_gateways_endpoints() -> None:
    choices = picker()
    for endpoint in ENDPOINTS * 2:
        assert choices.admit(RequestHead(C, {}, frozenset({endpoint, "10.9.9.9:1"}))).pick() == endpoint
    for among in (frozenset({"10.9.9.9:1"}), frozenset[str]()):
        with pytest.raises(RequestError, match=f"None of the {len(among)} endpoints") as error:
            choices.admit(RequestHead(C, {}, among)).pick()
        assert error.value.code is ErrorCode.UNAVAILABLE


def test_access_policy_applies() -> None:
    choices = picker(keys=("k",), per_key=(1, 0), max_bytes=100)
    with pytest.raises(RequestError, match="No API key was sent"):
        choices.admit(RequestHead(C, {}))
    with pytest.raises(RequestError, match="No API key was sent"):
        choices.admit(RequestHead("/readyz", {}))
    with pytest.raises(RequestError, match="The API key is invalid"):
        choices.admit(RequestHead(C, {"x-api-key": "\u20ac"}))
    with pytest.raises(RequestError, match="without the segments"):
        choices.admit(RequestHead("/docs/../v1/completions", {"x-api-key": "k"}))
    visit = choices.admit(RequestHead(C, {"authorization": "Bearer k"}))
    with pytest.raises(RequestError, match="at most 1 are allowed") as error:
        choices.admit(RequestHead(C, {"x-api-key": "k"}))
    assert error.value.code is ErrorCode.OVERLOADED
    with pytest.raises(RequestError, match="exceeds 100 bytes"):
        visit.take(bytes(101))
    visit.release()
    for server in choices.servers:
        server.set_trouble("is not ready")
    assert not choices.is_ready
    last = choices.admit(RequestHead(C, {"x-api-key": "k"}))
    with pytest.raises(RequestError, match=r"No server is available .*is not ready"):
        last.pick()
    last.release()
    choices.is_draining = True
    with pytest.raises(RequestError, match="is draining"):
        choices.admit(RequestHead(C, {"x-api-key": "k"}))
    assert choices.num_open == 0


def test_gateway_servers_are_addresses() -> None:
    pulse = Pulse(1.0, 5.0, 60.0, "", 1.0)
    for url, arguments in (
        ("http://quintet-pods:8000", "--engine-dns http://quintet-pods:8000"),
        ("http://10.0.0.5:8000/inner", "serve at the root"),
    ):
        with pytest.raises(ConfigError, match=arguments):
            Watch(Servers("prefix"), [url], None, pulse, DnsServers([]), by_address)
    Watch(Servers("prefix"), URLS, None, pulse, DnsServers([]), by_address)


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (["--endpoint-picker", "70000"], "--endpoint-picker is 70000"),
        (["--endpoint-picker-tls", "certificates"], "--endpoint-picker is not set"),
        (["--endpoint-picker", "9002"], "requires the Python package grpc: pip install 'quintet.gateway.'"),
    ],
)
def test_invalid_flags_are_rejected(
    flags: list[str], arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(ConfigError, match=arguments):
        _check(parser.parse_args(["route", "--engine", URLS[0], *flags]))
