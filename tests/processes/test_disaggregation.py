"""Two real servers, one of which computes a prompt and the other the answer: the text of a server that computes both."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Any

import pytest

from .server import Server, serve, wait_until

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory", "4MiB", "--threads", "1", "--audit")
PROMPT = "The river runs under the bridge, " * 40
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
NOBODY = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def computed_apart(
    prefill: Server, decode: Server, path: str = "/v1/completions", **asked: Any
) -> dict[str, Any]:
    """Do as the proxies do: have the prompt computed, hand the params on, return the answer."""
    body = {**ASKED, **asked}
    first = body | {
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY},
    }
    status, computed = prefill.post(path, first)
    assert status == 200, computed
    status, answer = decode.post(path, body | {"kv_transfer_params": computed["kv_transfer_params"]})
    assert status == 200, answer
    whole: dict[str, Any] = answer
    return whole


def cached(answer: dict[str, Any]) -> int:
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def blocks(server: Server, event: str) -> int:
    server.await_figures()
    return int(server.gauge_of("quintet:kv_peer_blocks_total", event))


@pytest.mark.whole
def test_a_prompt_computed_elsewhere_is_fetched(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    listen = f"127.0.0.1:{free_port()}"
    prefill_flags = ("--role", "prefill", "--kv-peer-listen", listen, "--kv-peer-key", str(key))
    with (
        serve(*FLAGS, *prefill_flags) as prefill,
        serve(*FLAGS, "--role", "decode", "--kv-peer-key", str(key)) as decode,
    ):
        alone = prefill.post("/v1/completions", ASKED)[1]
        answer = computed_apart(prefill, decode)
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        num_full = (alone["usage"]["prompt_tokens"] - 1) // 16
        assert cached(answer) == num_full * 16 > 0
        assert blocks(decode, "fetched") == num_full and blocks(decode, "missed") == 0
        assert blocks(prefill, "offered") >= num_full

        conversation = {"prompt": None, "messages": [{"role": "user", "content": PROMPT}]}
        chat = computed_apart(prefill, decode, "/v1/chat/completions", **conversation)
        assert cached(chat) > 0 and "kv_transfer_params" not in chat

        short = prefill.post(
            "/v1/completions", ASKED | {"prompt": "Hi", "kv_transfer_params": {"do_remote_decode": True}}
        )
        assert short[1]["kv_transfer_params"] is None, "it has no full block"

        other = ASKED | {"prompt": "Another " + PROMPT}
        first = other | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = prefill.post("/v1/completions", first)[1]["kv_transfer_params"]
        expected = prefill.post("/v1/completions", other)[1]["choices"][0]["text"]
        prefill.children()["quintet-executor-0"].kill()
        status, answer = decode.post("/v1/completions", other | {"kv_transfer_params": params})
        assert (status, answer["choices"][0]["text"], cached(answer)) == (200, expected, 0)
        wait_until(lambda: prefill.get("/readyz")[0] == 200, "another executor")
        turns = itertools.count(3)  # who was lost is not asked for some seconds
        wait_until(
            lambda: cached(computed_apart(prefill, decode, prompt=f"Turn {next(turns)} {PROMPT}")) > 0,
            "KV again",
        )
