"""Disaggregated prefill and decode on two real servers: same text as on one server."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any

import pytest

from .server import Server, serve, wait_until

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit")
DRAFTS = ("--speculative-config", '{"method": "suffix"}')
PROMPT = "The river runs under the bridge, " * 40
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
NO_REMOTE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def complete_disaggregated(
    prefill: Server, decode: Server, path: str = "/v1/completions", **fields: Any
) -> dict[str, Any]:
    """Send a prefill request, pass its ``kv_transfer_params`` to the decode server, return its response."""
    body = {**BODY, **fields}
    first = body | {
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **NO_REMOTE},
    }
    status, computed = prefill.post(path, first)
    assert status == 200, computed
    status, answer = decode.post(path, body | {"kv_transfer_params": computed["kv_transfer_params"]})
    assert status == 200, answer
    whole: dict[str, Any] = answer
    return whole


def num_cached_tokens(answer: dict[str, Any]) -> int:
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def num_blocks(server: Server, event: str) -> int:
    server.await_metrics()
    return int(server.gauge_of("quintet:kv_peer_blocks_total", event))


@pytest.mark.whole
@pytest.mark.parametrize("drafts", [(), DRAFTS], ids=["without drafts", "with drafts"])
def test_kv_of_a_remote_prefill_is_fetched(drafts: tuple[str, ...], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    listen = f"127.0.0.1:{free_port()}"
    prefill_flags = ("--role", "prefill", "--kv-peer-listen", listen, "--kv-peer-key", str(key))
    with (
        serve(*FLAGS, *prefill_flags, *drafts) as prefill,
        serve(*FLAGS, "--role", "decode", "--kv-peer-key", str(key), *drafts) as decode,
    ):
        alone = prefill.post("/v1/completions", BODY)[1]
        answer = complete_disaggregated(prefill, decode)
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        num_full = (alone["usage"]["prompt_tokens"] - 1) // 16
        assert num_cached_tokens(answer) == num_full * 16 > 0
        assert num_blocks(decode, "fetched") == num_full and num_blocks(decode, "missed") == 0
        assert num_blocks(prefill, "offered") >= num_full

        conversation = {"prompt": None, "messages": [{"role": "user", "content": PROMPT}]}
        chat = complete_disaggregated(prefill, decode, "/v1/chat/completions", **conversation)
        assert num_cached_tokens(chat) > 0 and "kv_transfer_params" not in chat

        short = prefill.post(
            "/v1/completions", BODY | {"prompt": "Hi", "kv_transfer_params": {"do_remote_decode": True}}
        )
        assert short[1]["kv_transfer_params"] is None, "the prompt has no full block"

        other = BODY | {"prompt": "Another " + PROMPT}
        first = other | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = prefill.post("/v1/completions", first)[1]["kv_transfer_params"]
        expected = prefill.post("/v1/completions", other)[1]["choices"][0]["text"]
        prefill.children()["quintet-executor-0"].kill()
        status, answer = decode.post("/v1/completions", other | {"kv_transfer_params": params})
        assert (status, answer["choices"][0]["text"], num_cached_tokens(answer)) == (200, expected, 0)
        wait_until(lambda: prefill.get("/readyz")[0] == 200, "another executor")
        turns = itertools.count(3)  # a failed peer is skipped for some seconds
        wait_until(
            lambda: (
                num_cached_tokens(
                    complete_disaggregated(prefill, decode, prompt=f"Turn {next(turns)} {PROMPT}")
                )
                > 0
            ),
            "a fetch of KV",
        )
