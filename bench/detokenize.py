"""Measure the detokenizer's throughput, in tokens per second of one core.

    python -m bench.detokenize [--tokenizer FOLDER] [--rows 256] [--steps 400] [--repeats 7]

Prints JSON with medians over repeats:

* ``row_loop``: from encoded `Tokens` messages (one new token for each of ``--rows`` requests) to encoded `Text` messages, as in
  the detokenizer process, without sockets.
* ``row_loop_beside_logprobs``: the same, and one of the requests has log-probabilities.
* ``table_walk``: the loop without decoding and encoding of messages.
* ``decode_stream``: the incremental decoder of the tokenizers library on the same tokens, for comparison.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from bench.arguments import command_parser
from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.rows import Steps
from quintet.detokenizer_proc.vocabulary import Vocabulary
from quintet.wire.codec import encode, pack_f32, pack_i32, pack_i64, pack_u8
from quintet.wire.ids import RequestIds
from quintet.wire.messages import Open, Tokens
from quintet.wire.request import Echo
from quintet.wire.step import TokenLogprobs


def token_stream(tokenizer: Tokenizer, rows: int, steps: int) -> list[list[int]]:
    """Return ``steps`` tokens for each of ``rows`` requests: this file's text from a different offset for each request."""
    ids = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False).ids
    return [[ids[(row * 37 + step) % len(ids)] for row in range(rows)] for step in range(steps)]


def messages(stream: list[list[int]], stop: list[str], *, with_logprobs: bool = False) -> list[Tokens]:
    """Return the messages of all steps; the first one opens all requests. ``with_logprobs``: for the first request."""
    rows = len(stream[0])
    first = RequestIds(0, 1).take(rows)
    ids = range(first, first + rows)
    opens = [Open(i, 0, 0, b"", stop, False, True, True, Echo.NONE, False, 0, 0, 0) for i in ids]
    return [
        Tokens(
            step,
            0,
            opens if step == 0 else [],
            pack_i64(ids),
            pack_i32([step] * rows),
            pack_u8([1] * rows),
            pack_i32(tokens),
            pack_u8([0] * rows),
            b"",
            [TokenLogprobs(0, 1, pack_i32([tokens[0], 5, 6]), pack_f32([-0.5, -1.0, -2.0]))]
            if with_logprobs
            else [],
        )
        for step, tokens in enumerate(stream)
    ]


def rate(work: Callable[[], None], num_tokens: int, repeats: int) -> float:
    """Return the median of tokens per second of CPU time."""
    work()
    rates = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        rates.append(num_tokens / (time.process_time() - began))
    return round(statistics.median(rates))


def main() -> None:
    """Measure and print JSON."""
    parser = command_parser(__doc__)
    default = Path(__file__).resolve().parent.parent / "deploy" / "embedded" / "default"
    parser.add_argument("--tokenizer", type=Path, default=default, help="folder with tokenizer.json")
    parser.add_argument("--rows", type=int, default=256, help="requests in a step (default: 256)")
    parser.add_argument("--steps", type=int, default=400, help="steps in a repeat (default: 400)")
    parser.add_argument(
        "--repeats", type=int, default=7, help="repeats; results are their medians (default: 7)"
    )
    arguments = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    showing = PieceTable(Vocabulary.of(tokenizer))
    stream = token_stream(tokenizer, arguments.rows, arguments.steps)
    plain, stopping = messages(stream, []), messages(stream, ["\n\n\n\n\n", "<nowhere>"])
    frames = [encode(message) for message in plain]
    beside = [encode(message) for message in messages(stream, [], with_logprobs=True)]
    decode = msgspec.msgpack.Decoder(Tokens).decode

    def walk(steps: list[Tokens]) -> None:
        state = Steps(showing)
        for message in steps:
            state.apply(message)

    def row_loop(frames: list[bytes]) -> None:
        state = Steps(showing)
        for frame in frames:
            for _, text in state.apply(decode(frame)):
                encode(text)

    def decode_stream() -> None:
        streams = [DecodeStream(skip_special_tokens=True) for _ in range(arguments.rows)]
        for tokens in stream:
            for one, token_id in zip(streams, tokens, strict=True):
                one.step(tokenizer, token_id)

    num_tokens = arguments.rows * arguments.steps
    measured = {
        "row_loop": lambda: row_loop(frames),
        "row_loop_beside_logprobs": lambda: row_loop(beside),
        "table_walk": lambda: walk(plain),
        "table_walk_with_stop_strings": lambda: walk(stopping),
        "decode_stream": decode_stream,
    }
    report = {
        "benchmark": "detokenize",
        "style": showing.spec.kind,
        "rows": arguments.rows,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "python": platform.python_version(),
        "tokens_per_second": {
            name: rate(work, num_tokens, arguments.repeats) for name, work in measured.items()
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
