"""``kv_transfer_params``: parsing of the fields that proxies send, and the fields of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.wire.config import KvPeersConfig
from quintet.wire.messages import Submit
from quintet.wire.request import KvTransfer

C, H = "/v1/completions", "/v1/chat/completions"
NO_REMOTE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **NO_REMOTE}
PREFILL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "10.0.0.5:5600",
    "remote_block_ids": [0, 1],
    "remote_host": "10.0.0.5",
    "remote_port": 5600,
    "tp_size": 1,
}
WORDS = "w " * 37
"""37 tokens in the fake engine: two full blocks of 16."""


def peers(
    role: Any = "both", allowed: tuple[str, ...] = ("10.0.0.0/24", "fd00::/8", "prefill-0")
) -> KvPeersConfig:
    fetches = [] if role == "prefill" else [*allowed]
    return KvPeersConfig(role=role, listen="" if role == "decode" else "10.0.0.5:5600", allowed=fetches)


def test_a_prefill_server_returns_the_location_of_kv(serve: Any) -> None:
    server = serve(peers=peers("prefill"))
    reply = server.ask("POST", C, {"prompt": WORDS, "max_tokens": 1, "kv_transfer_params": DECODE})
    assert reply.json["kv_transfer_params"] == {key: PREFILL[key] for key in PREFILL if key != "tp_size"}
    assert server.engine.wait_for(Submit)[0].spec.kv_transfer == KvTransfer(offers=True)
    few = server.ask("POST", C, {"prompt": "w w", "max_tokens": 1, "kv_transfer_params": DECODE})
    assert few.json["kv_transfer_params"] is None, "no block is full"
    plain = server.ask("POST", C, {"prompt": WORDS, "max_tokens": 1})
    assert "kv_transfer_params" not in plain.json
    assert server.engine.wait_for(Submit)[2].spec.kv_transfer is None


@pytest.mark.parametrize(
    ("changed", "transfer"),
    [
        ({}, KvTransfer(peer="10.0.0.5:5600", num_blocks=2)),
        ({"remote_host": "fd00::7"}, KvTransfer(peer="[fd00::7]:5600", num_blocks=2)),
        ({"remote_host": "[fd00::7]"}, KvTransfer(peer="[fd00::7]:5600", num_blocks=2)),
        ({"remote_host": "Prefill-0"}, KvTransfer(peer="Prefill-0:5600", num_blocks=2)),
        ({"remote_block_ids": []}, KvTransfer(peer="10.0.0.5:5600", num_blocks=0)),
        ({"remote_block_ids": None}, KvTransfer(peer="10.0.0.5:5600", num_blocks=1 << 30)),
        ({"do_remote_prefill": False}, None),
    ],
)
def test_a_decode_server_submits_the_location_of_kv(
    serve: Any, changed: dict[str, Any], transfer: KvTransfer | None
) -> None:
    server = serve(peers=peers("decode"))
    body = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": PREFILL | changed}
    for path, sent in ((H, body), (C, {"prompt": "x", "kv_transfer_params": PREFILL | changed})):
        assert server.ask("POST", path, sent).status == 200
    assert [submit.spec.kv_transfer for submit in server.engine.wait_for(Submit, 2)] == [transfer, transfer]


@pytest.mark.parametrize(
    ("role", "sent", "body", "words"),
    [
        (
            None,
            DECODE,
            {},
            "with no --role, offers no KV; leave it out, or start the server with --role prefill",
        ),
        ("decode", DECODE, {}, "with --role decode, offers no KV"),
        ("prefill", PREFILL, {}, "with --role prefill, fetches no KV"),
        ("both", DECODE | {"do_remote_prefill": True}, {}, "both true"),
        ("both", DECODE, {"stream": True}, "set stream to false"),
        ("both", DECODE, {"prompt": ["a", "b"]}, "one prompt"),
        ("both", DECODE, {"use_beam_search": True, "n": 2}, "no beam search"),
        ("both", PREFILL | {"remote_port": None}, {}, "remote_port None"),
        ("both", PREFILL | {"remote_port": 70000}, {}, "remote_port 70000"),
        ("both", PREFILL | {"remote_port": "5600"}, {}, "remote_port"),
        ("both", PREFILL | {"remote_host": ""}, {}, "remote_host is ''"),
        (
            "both",
            PREFILL | {"remote_host": "10.0.1.5"},
            {},
            "only from 10.0.0.0/24, fd00::/8, prefill-0; the operator",
        ),
        ("both", PREFILL | {"remote_host": "prefill-1"}, {}, "--kv-peers"),
        ("both", PREFILL | {"remote_host": "fd00::1%x]:1;10.0.0.5"}, {}, "--kv-peers"),
        ("both", {"remote_host": "10.0.0.5"}, {}, "neither do_remote_prefill nor do_remote_decode"),
        ("both", [1], {}, "kv_transfer_params"),
    ],
)
def test_invalid_params_are_refused(
    serve: Any, role: str | None, sent: Any, body: dict[str, Any], words: str
) -> None:
    server = serve(peers=None if role is None else peers(role))
    reply = server.ask("POST", C, {"prompt": "x", "max_tokens": 1, "kv_transfer_params": sent, **body})
    assert reply.status == 400
    assert words in reply.json["error"]["message"] and "kv_transfer_params" in reply.json["error"]["param"]
