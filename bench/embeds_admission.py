"""Measure how long the admission of a prompt of embeddings blocks the core's loop.

    python -m bench.embeds_admission [--megabytes 24]

Prints one JSON object with medians in milliseconds:

* ``open``: verification of the frame's HMAC.
* ``decode``: decoding of the message.
* ``admit``: admission to the queue.
* ``admit_refusing``: the same in a core that compares it with a poison request (`core.poison_isolation`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import msgspec

from bench.core_step import make_engine
from quintet.core.poison_isolation import Rejections
from quintet.process.sockets import KEY_BYTES, FrameHmac
from quintet.wire import codec
from quintet.wire.embeds import EmbedsSpan, digest_of
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec

WIDTH, TRIES = 4096, 9


def measure(megabytes: int) -> dict[str, float]:
    """Return the medians for a prompt of bf16 embeddings of this size."""
    num_tokens = megabytes * 10**6 // (2 * WIDTH)
    span = EmbedsSpan(0, "BF16", WIDTH, os.urandom(2 * WIDTH * num_tokens))
    span = msgspec.structs.replace(span, digest=digest_of(span))
    admit = Admit(1, bytes(4 * num_tokens), RequestSpec(SamplingParams(max_tokens=1), 0, 0), 0, embeds=[span])
    hmac, decoder = FrameHmac(os.urandom(KEY_BYTES)), msgspec.msgpack.Decoder(Admit)
    payload = codec.encode(admit)
    frame = hmac.sign(payload)
    rejections = Rejections()
    rejections.add(b"another", "executor failed", 0)

    def admit_to_new_core() -> None:
        make_engine(0, 1).admit(admit, 0)

    def check_and_admit() -> None:
        rejections.answer_to(admit, 0)
        admit_to_new_core()

    work: dict[str, Callable[[], object]] = {
        "open": lambda: hmac.verify(frame),
        "decode": lambda: decoder.decode(payload),
        "admit": admit_to_new_core,
        "admit_refusing": check_and_admit,
    }
    return {f"{name}_ms": round(1000 * _median_s(each), 2) for name, each in work.items()}


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description="Measure how long the admission of a prompt of embeddings blocks the core's loop."
    )
    parser.add_argument("--megabytes", type=int, default=24, help="size of the prompt (default: 24)")
    args = parser.parse_args()
    json.dump({"megabytes": args.megabytes, **measure(args.megabytes)}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
