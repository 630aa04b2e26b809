"""`kill -9` with suffix decoding: the cache of outputs is lost, and all responses stay the same."""

from __future__ import annotations

import asyncio

import pytest
from bench.chaos.streams import crowd, play

from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.processes.server import serve

pytestmark = pytest.mark.whole
"""`tests.models.speculation.test_bits` tests outputs with and without a filled cache, without a server."""

CACHED = "quintet:spec_decode_cached_requests"
DRAFTS = ("--speculative-config", '{"method": "suffix", "suffix_decoding_max_spec_factor": 4}')


def test_kills_with_cached_outputs_keep_all_bytes() -> None:
    requests = crowd(4, 12, (60, 120))
    with serve(*little_memory("model", 12), *COMMON) as plain:
        reference = asyncio.run(play(plain.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)
    with serve(*little_memory("model", 12), *COMMON, *DRAFTS) as server:
        for role in (None, "executor", "core", "executor"):

            async def disturb(role: str | None = role) -> None:
                if role is not None:
                    kill(server, role)

            assert_same(server, reference, asyncio.run(play(server.url, requests, disturb)), requests)
            server.await_metrics()
            assert server.gauge(CACHED) > 0
            assert server.gauge("quintet:spec_decode_num_accepted_tokens_total") > 0
