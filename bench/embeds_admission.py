"""Time the core's loop spends on the arrival of a prompt of vectors: until then no other step is planned.

    python -m bench.embeds_admission [--megabytes 24]

``open``: the seal of its frame; ``decode``: from bytes to a message; ``admit``: until it waits for its turn; ``admit_refusing``:
the same in a core that remembers a request which made the executor fail, and so looks whether this is it.
Prints one JSON object: medians in milliseconds.
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
from quintet.core.poison_isolation.rejections import Rejections
from quintet.process.sockets import KEY_BYTES, FrameHmac
from quintet.wire import codec
from quintet.wire.embeds import EmbedsSpan, digest_of
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec

WIDTH, TRIES = 4096, 9


def measure(megabytes: int) -> dict[str, float]:
    """Return the medians for a prompt of so many megabytes of bf16."""
    num_tokens = megabytes * 10**6 // (2 * WIDTH)
    span = EmbedsSpan(0, "BF16", WIDTH, os.urandom(2 * WIDTH * num_tokens))
    span = msgspec.structs.replace(span, digest=digest_of(span))
    admit = Admit(1, bytes(4 * num_tokens), RequestSpec(SamplingParams(max_tokens=1), 0, 0), 0, embeds=[span])
    seal, decoder = FrameHmac(os.urandom(KEY_BYTES)), msgspec.msgpack.Decoder(Admit)
    payload = codec.encode(admit)
    frame = seal.sign(payload)
    refusals = Rejections()
    refusals.add(b"another", "it did", 0)

    def admit_anew() -> None:
        make_engine(0, 1).admit(admit, 0)

    def refusing() -> None:
        refusals.answer_to(admit, 0)
        admit_anew()

    work: dict[str, Callable[[], object]] = {
        "open": lambda: seal.verify(frame),
        "decode": lambda: decoder.decode(payload),
        "admit": admit_anew,
        "admit_refusing": refusing,
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
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Time the core's loop spends on the arrival of a prompt of vectors."
    )
    parser.add_argument("--megabytes", type=int, default=24)
    args = parser.parse_args()
    json.dump({"megabytes": args.megabytes, **measure(args.megabytes)}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
