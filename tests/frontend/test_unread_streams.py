"""Memory estimate of batches for a slow reader: bytes allocated, not characters."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from quintet.frontend.live_requests import LiveRequests
from quintet.wire import codec
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Alternative, PositionLogprobs, RowLogprobs, Text, TextPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from tests.frontend.configs import make_config

NUM_STEPS = 400


def frames(request_id: int, num_top: int) -> list[bytes]:
    """Return the detokenizer's messages for `NUM_STEPS` steps of one token."""
    sent = []
    for step in range(NUM_STEPS):
        delta = f" t{step:03}"
        around = [Alternative(step + i, -0.5 * i, f" u{i}", b" u%d" % i, i + 1) for i in range(num_top + 1)]
        positions = [RowLogprobs(0, [PositionLogprobs(around[0], around[1:], 5 * step)])] if num_top else []
        row = (request_id, delta, 5 * step, step, codec.pack_i32([step]))
        sent.append(
            codec.encode(
                Text(step, 0, 0, [], [row[0]], [row[1]], [row[2]], [row[3]], [1], row[4], [], positions)
            )
        )
    return sent


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_estimate_covers_allocated_memory_closely(num_top: int) -> None:
    requests = LiveRequests(WorkerId(Role.FRONTEND, 0, 1), lambda *_: True, make_config())
    stream = requests.submit(
        TextPrompt("x"), RequestSpec(SamplingParams(max_tokens=None, logprobs=num_top or None))
    )
    decoder = msgspec.msgpack.Decoder(Text)
    received = frames(stream.request_id, num_top)
    tracemalloc.start()
    for frame in received:
        requests.apply_text(decoder.decode(frame))
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Lists grow by an eighth ahead of need, and objects are rounded up to 16 bytes.
    assert allocated * 0.85 <= stream.unread_bytes() <= allocated * 1.25
    stream.take()
    assert stream.unread_bytes() == 0
