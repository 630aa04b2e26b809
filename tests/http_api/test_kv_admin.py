"""/kv: authorization, queries to the cores and their reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quintet.frontend.http.auth import operator_keys
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import KvDiskConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.kv_admin import KvPrefix, KvQuery, KvReport, KvUsage
from quintet.wire.messages import Failed

NAME = "5f0c31a7"
DIGEST = bytes.fromhex(NAME.ljust(64, "0"))
USAGE = KvUsage(1000, 16, 50, 7, 3, 20, 0, 0)


class Operator:
    """A server with an operator key, and a core with answers set by the test."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self.server = serve(api_keys=["client"], admin_key="operator")
        self.queries: list[KvQuery] = []
        self.prefix = KvPrefix(DIGEST, 48, 3, 0, 2, True, 1_500_000_000, pack_i32(range(10, 58)))
        self.error: Failed | None = None
        send = self.server.engine.send

        def answer(role: Any, index: int, message: Any) -> bool:
            if isinstance(message, KvQuery):
                self.queries.append(message)
                report = KvReport(message.query_id, 0, [self.prefix], 1, usage=USAGE)
                if self.error is not None:
                    report = KvReport(message.query_id, 0, error=self.error)
                self.server.loop.call_soon(self.server.engine.deliver, report)
                return True
            return bool(send(role, index, message))

        self.server.service.queries._send = answer

    def ask(self, method: str, path: str, body: Any = None, key: str = "operator") -> Any:
        return self.server.ask(method, path, body, {"authorization": f"Bearer {key}"} if key else {})


@pytest.fixture
def operator(serve: Callable[..., Any]) -> Operator:
    return Operator(serve)


def test_only_operators_have_access(operator: Operator) -> None:
    paths = (
        "/kv",
        "/kv/pin",
        "/kv/evict",
        "/kv/else",
        "/kv%0A",
        "/kv/pin%0A",
        "/kv%0A/",
        "//kv%0A",
        "/kv%00",
        "/%6bv",
    )
    for method, path in itertools.product(("GET", "POST"), paths):
        for key in ("", "client", "wrong"):
            status = operator.ask(method, path, key=key).status
            assert status == 401 or (
                status == 404 and key == "client" and path.startswith(("/kv%", "//kv%"))
            ), path
    derived, configured = operator_keys(operator.server.config)
    assert configured == "operator" and operator.ask("GET", "/kv", key=derived).status == 200
    assert operator.ask("GET", "/v1/models").status == 401, "the operator key is not an API key"
    assert len(operator.queries) == 1


def test_without_keys_the_api_is_open_and_kv_is_closed(serve: Callable[..., Any]) -> None:
    server = serve()
    assert server.ask("GET", "/v1/models").status == 200
    assert server.ask("GET", "/kv").status == 401
    assert len(operator_keys(server.config)) == 1


def test_prefixes_are_listed_by_hash_and_optionally_as_text(operator: Operator) -> None:
    listing = operator.ask("GET", "/kv?limit=5").json
    assert listing["data"] == [
        {
            "id": DIGEST.hex(),
            "object": "kv.prefix",
            "engine": 0,
            "tokens": 48,
            "blocks": {"memory": 3, "host": 0, "disk": 2},
            "bytes": 5000,
            "pinned": True,
            "last_used_s": 1.5,
        }
    ]
    assert (
        listing["engines"][0]["blocks_pinned_at_most"] == 20
        and not listing["has_more"]
        and not listing["errors"]
    )
    assert (operator.queries[0].limit, operator.queries[0].with_tokens) == (5, False)
    listing = operator.ask("GET", "/kv?text=true").json
    assert listing["data"][0]["token_ids"] == list(range(10, 58))
    assert listing["data"][0]["text"].startswith(" t0 t1 t2")
    assert (operator.queries[1].limit, operator.queries[1].with_tokens) == (100, True)


def test_a_prefix_is_given_by_name_text_or_ids(operator: Operator) -> None:
    bodies = ({"id": NAME.upper()}, {"prompt": "hello", "cache_salt": "s"}, {"token_ids": [4, 5]})
    for verb, body in zip(("pin", "unpin", "evict"), bodies, strict=True):
        answer = operator.ask("POST", f"/kv/{verb}", body)
        assert answer.status == 200 and answer.json["object"] == f"kv.{verb}"
        assert answer.json["data"][0]["id"] == DIGEST.hex()
    pin, unpin, evict = operator.queries
    assert (pin.verb, pin.name, pin.token_ids) == ("pin", NAME, b"")
    assert (unpin.verb, unpin.salt, list(unpack_i32(unpin.token_ids))) == ("unpin", "s", list(range(5)))
    assert (evict.verb, list(unpack_i32(evict.token_ids))) == ("evict", [4, 5])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/kv/pin", {}, "0 of id, prompt and token_ids were sent"),
        ("/kv/pin", {"id": NAME, "prompt": "a"}, "2 of id, prompt and token_ids were sent"),
        ("/kv/pin", {"id": "xyz"}, "id must be a hexadecimal prefix id"),
        ("/kv/evict", {"token_ids": []}, "The prefix has 0 tokens; send 1 to 256."),
        ("/kv/evict", {"token_ids": [1000]}, "token_ids"),
        ("/kv/unpin", {"ids": NAME}, "ids"),
        ("/kv?limit=0", None, "limit must be a number from 1 to 1000"),
    ],
)
def test_invalid_requests_are_refused(operator: Operator, path: str, body: object, words: str) -> None:
    answer = operator.ask("GET" if body is None else "POST", path, body)
    assert answer.status == 400 and words in answer.json["error"]["message"]
    assert not operator.queries


def test_export_and_import_need_a_disk_tier_and_stay_in_its_folder(operator: Operator) -> None:
    for path, body in (("/kv/export", {"id": NAME, "file": "a.kv"}), ("/kv/import", {"file": "a.kv"})):
        answer = operator.ask("POST", path, body)
        assert answer.status == 400 and "require --kv-disk" in answer.json["error"]["message"]
    config = operator.server.config
    disk = KvDiskConfig(folder="/kv", size_bytes=1 << 20, staging_bytes=1 << 20)
    cache = msgspec.structs.replace(config.cache, disk=disk)
    operator.server.service.config = msgspec.structs.replace(config, cache=cache)
    exported = operator.ask("POST", "/kv/export", {"id": NAME, "file": "a.kv"})
    assert (exported.status, exported.json["file"]) == (200, "/kv/exchange/a.kv")
    assert operator.ask("POST", "/kv/import", {"file": "a.kv"}).json["data"][0]["engine"] == 0
    assert [(query.verb, query.file) for query in operator.queries] == [
        ("export", "a.kv"),
        ("import", "a.kv"),
    ]
    for name in ("", "../a.kv", "/etc/passwd", ".hidden", "a" * 101):
        answer = operator.ask("POST", "/kv/import", {"file": name})
        assert answer.status == 400 and "file must be a name" in answer.json["error"]["message"]


def test_a_core_error_is_returned(operator: Operator) -> None:
    operator.error = Failed(0, ErrorCode.NOT_FOUND, "There is no such prefix.")
    answer = operator.ask("POST", "/kv/pin", {"id": NAME})
    assert (answer.status, answer.json["error"]["message"]) == (404, "There is no such prefix.")
