"""Time to sign, verify and validate a frame, next to encoding and decoding it.

    python -m bench.chaos.frames            the four messages of a step of 256 requests, and of one

Each figure is the least of many short runs: what the work takes when nothing interrupts it.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import msgspec

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.process.frame_hmac import FrameHmac
from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.codec import encode, pack_i32, pack_i64
from quintet.wire.validate import Validator

RUNS, CALLS = 200, 100


def messages_of_a_step(num_rows: int) -> list[msgspec.Struct]:
    """Return what passes between the processes while every row draws one token."""
    draw = random.Random(num_rows)
    ids = pack_i32(draw.randrange(2048, 3840) for _ in range(num_rows))
    requests = [1 << 40 | draw.randrange(1 << 20) for _ in range(num_rows)]
    positions = [draw.randrange(1, 900) for _ in range(num_rows)]
    blocks = pack_i32(number for row in range(0, num_rows, 16) for number in (row, 3, row + 77))
    ones = [1] * num_rows
    return [
        s.StepPlan(
            5, 1, b"", [], blocks, b"", pack_i32(range(num_rows)), pack_i32(positions), pack_i32(ones), bytes(ones)
        ),
        s.StepResult(5, 1, ids),
        m.Tokens(
            5, 1, [], pack_i64(requests), pack_i32(positions), bytes(ones), ids, bytes(num_rows), pack_i32([-1] * num_rows)
        ),
        m.Text(5, 1, 1, [], requests, [f" word{n % 99}" for n in positions], positions, positions, ones, ids, []),
    ]  # fmt: skip


def least_us(call: Callable[[], object]) -> float:
    """Return the microseconds of one call, at best."""
    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sense = Validator(resolve(Options(executor="mock", max_num_seqs=256), Path(folder)).config)
    seal = FrameHmac(os.urandom(32))
    for num_rows in (256, 1):
        print(f"{num_rows} rows    bytes   seal   open  sense  encode  decode   (us)")
        totals = [0.0] * 5
        for message in messages_of_a_step(num_rows):
            assert sense.accepts(message), message
            payload = encode(message)
            frame, decode = seal.sign(payload), msgspec.msgpack.Decoder(type(message)).decode
            figures = [
                least_us(lambda payload=payload: seal.sign(payload)),  # type: ignore[misc]
                least_us(lambda frame=frame: seal.verify(frame)),  # type: ignore[misc]
                least_us(lambda message=message: sense.accepts(message)),  # type: ignore[misc]
                least_us(lambda message=message: encode(message)),  # type: ignore[misc]
                least_us(lambda decode=decode, payload=payload: decode(payload)),  # type: ignore[misc]
            ]
            totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
            print(
                f"{type(message).__name__:<10}",
                f"{len(payload):6}",
                *(f"{figure:6.2f}" for figure in figures),
            )
        print("together         ", *(f"{total:6.2f}" for total in totals))


if __name__ == "__main__":
    main()
