"""Measure the cost of structured outputs: the grammar library alone, and batches with and without a schema.

    python -m bench.structured [--rows 64] [--pairs 5] [--library-only] [--model FOLDER] [--tokens 384]

Library: times to open the vocabulary of the null model (33,024 tokens, `bench.null_model`) and to compile a schema. Along
documents that the schemas allow: times to compute a mask and to accept a token. Mask times are CPU times of the thread, with
copies of one matcher (a cached schema) and with new matchers.

Batch: ``--rows`` requests of ``--tokens`` tokens through `LLM`, alternately without a schema and with one that needs more tokens.
Prints medians of the pairs and of their ratios.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.arguments import command_parser
from bench.null_model import make_null_model
from quintet import LLM, SamplingParams, StructuredOutputsParams
from quintet.deploy.config.model.hf_config import read_facts
from quintet.process.grammars import open_matcher, open_vocabulary
from quintet.wire.config import ModelConfig
from quintet.wire.kv_spec import full_layers

TEXT = {"type": "string"}
FIELDS = {
    f"field_{i}": [TEXT, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}][i % 4]
    for i in range(10)
}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
}
PERSON = {
    "name": {"type": "string", "maxLength": 50},
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "email": {"type": "string", "format": "email"},
    "tags": {"type": "array", "items": TEXT, "maxItems": 10},
    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
}
CASES: dict[str, tuple[dict[str, Any], object]] = {
    "10 fields": (
        {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False},
        {name: ["some text, with é and \"quotes\"", 12345, 3.25, True][i % 4] for i, name in enumerate(FIELDS)},
    ),
    "a person": (
        {"type": "object", "properties": PERSON, "required": ["name", "age"], "additionalProperties": False},
        {"name": "Ada Lovelace", "age": 36, "email": "ada@example.com", "tags": ["engines"], "zip": "12345"},
    ),
    "a tree": ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, {"v": 1, "c": [{"v": 2, "c": [{"v": 3}]}, {"v": 5, "c": []}]}),
    "any object": ({"type": "object"}, {"a": [1, 2, {"b": None, "c": "some longer text with words"}], "d": -1.5e3}),
    "one of 500": ({"enum": [f"value {i} of {i * 7919 % 1000}" for i in range(500)]}, "value 77 of 763"),
    "100 optional": (
        {"type": "object", "properties": {f"p{i}": TEXT for i in range(100)}, "additionalProperties": False},
        {"p3": "x", "p50": "hello world", "p99": "z"},
    ),
}  # fmt: skip
LONG_SCHEMA = {"type": "array", "items": CASES["a person"][0], "minItems": 1000}
REPETITIONS = 20
NUM_TOKENS = 384


def main() -> None:
    """Measure and print JSON."""
    parser = command_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="concurrent requests (default: 64)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of batches (default: 5)")
    parser.add_argument("--library-only", action="store_true", help="measure only the library")
    parser.add_argument("--model", type=Path, help="model folder (default: the null model)")
    parser.add_argument(
        "--tokens", type=int, default=NUM_TOKENS, help="output tokens of each request (default: 384)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or make_null_model(Path(folder) / "null")
        measured: dict[str, object] = {"library": _library(path)}
        if not options.library_only:
            measured["batch"] = _batch(path, options.rows, options.pairs, options.tokens)
    print(json.dumps(measured, indent=1))


def _library(path: Path) -> dict[str, object]:
    facts = read_facts(path)
    model = ModelConfig(
        path=str(path),
        tokenizer_path=str(path),
        served_names=["null"],
        architecture=facts.architecture,
        dtype="bfloat16",
        vocab_size=facts.spec.vocab_size,
        max_model_len=512,
        eos_token_ids=facts.eos_token_ids,
        kv=full_layers(1, 1, 8, 4, 16),
    )
    began = time.process_time()
    vocabulary = open_vocabulary(model)
    times: dict[str, object] = {"vocabulary_ms": _ms(time.process_time() - began)}
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    mask = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    all_masks: list[int] = []
    all_new_masks: list[int] = []
    for name, (schema, document) in CASES.items():
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        began = time.process_time()
        first = open_matcher(vocabulary, grammar)
        build_s = time.process_time() - began
        ids = tokenizer.encode(json.dumps(document, ensure_ascii=False)).ids
        new, masks, advances = list[int](), list[int](), list[int]()
        for number in range(REPETITIONS):
            _walk(first.deep_copy(), ids, mask, masks if number else [], advances)
            _walk(open_matcher(vocabulary, grammar), ids, mask, new, [])
        all_masks += masks
        all_new_masks += new
        times[name] = {
            "build_ms": _ms(build_s),
            "mask_us": _percentiles(masks),
            "new_mask_us": _percentiles(new),
            "advance_us": _percentiles(advances),
        }
    times["all masks"], times["all masks, new"] = _percentiles(all_masks), _percentiles(all_new_masks)
    return times


def _walk(
    matcher: LLMatcher, ids: list[int], mask: NDArray[np.uint32], masks: list[int], advances: list[int]
) -> None:
    """Accept the tokens of a document; append the CPU time of each mask and each token, in ns."""
    for token in ids:
        began_ns = time.thread_time_ns()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        mask_end_ns = time.thread_time_ns()
        assert matcher.consume_token(token), matcher.get_error()
        masks.append(mask_end_ns - began_ns)
        advances.append(time.thread_time_ns() - mask_end_ns)


def _batch(path: Path, rows: int, pairs: int, num_tokens: int) -> dict[str, object]:
    plain = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    structured_outputs = StructuredOutputsParams(json=LONG_SCHEMA)
    with_schema = SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, seed=1, structured_outputs=structured_outputs
    )
    prompts = [[100 + i, *range(200, 231)] for i in range(rows)]
    rates: dict[str, list[float]] = {"plain": [], "with a schema": []}
    with LLM(str(path), max_num_seqs=rows, max_model_len=512) as llm:
        for _ in range(pairs + 1):
            for name, params in (("plain", plain), ("with a schema", with_schema)):
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                total = sum(len(each.outputs[0].token_ids) for each in outputs)
                rates[name].append(total / (time.perf_counter() - began))
    ratios = [slow / fast for fast, slow in zip(rates["plain"][1:], rates["with a schema"][1:], strict=True)]
    medians = {f"{name}, tokens/s": round(statistics.median(each[1:])) for name, each in rates.items()}
    return {
        **medians,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
    }


def _percentiles(times_ns: list[int]) -> dict[str, float]:
    ordered = sorted(times_ns)
    return {
        "p50": ordered[len(ordered) // 2] / 1e3,
        "p99": ordered[int(len(ordered) * 0.99)] / 1e3,
        "max": ordered[-1] / 1e3,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


if __name__ == "__main__":
    main()
