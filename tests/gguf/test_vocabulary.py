"""Tokenizer metadata of a file: it gives a tokenizer or a one-line error, with memory proportional to the file."""

from __future__ import annotations

import struct
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quintet.deploy.config.gguf.tokenizer import generation_of_gguf, tokenizer_of_gguf
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.wire.errors import ConfigError
from tests.gguf.bytes_of_files import ARRAY, STRING, array, file_of, key, text

PREFIX = "tokenizer.ggml."
TIMES_THE_FILE = 48
"""Memory per byte of the file. A token takes at least 9 bytes in the file; parsed, a text, an index entry and its type."""
ANY_FILE = 1 << 21
"""Bytes that any file may take: the merges of a small vocabulary."""


def texts(*values: str | bytes) -> bytes:
    return array(STRING, len(values), b"".join(map(text, values)))


def written(metadata: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return a file with this tokenizer metadata; values: kind, and bytes."""
    return file_of([key(name, *value) for name, value in metadata.items()])


def vocabulary(model: str, tokens: Sequence[str | bytes], **more: tuple[int, bytes]) -> bytes:
    its_own = {"model": (STRING, text(model)), "tokens": (ARRAY, texts(*tokens)), **more}
    return written({f"{PREFIX}{name}": value for name, value in its_own.items()})


def made(folder: Path, raw: bytes) -> Tokenizer:
    """Return the tokenizer of a file; its stop tokens are parsed as well."""
    path = folder / "model.gguf"
    path.write_bytes(raw)
    parts = read_parts(path)
    generation_of_gguf(parts)
    return Tokenizer.from_file(str(tokenizer_of_gguf(parts, folder / "cache") / "tokenizer.json"))


def refused(folder: Path, raw: bytes) -> str:
    """Return the error of a rejected file: one line that names it."""
    with pytest.raises(ConfigError) as raised:
        made(folder, raw)
    message = str(raised.value)
    assert message.startswith(f"{folder / 'model.gguf'}: {PREFIX}") and "\n" not in message
    return message


_ONE = ("a",)
WRONG = {
    "no tokens": (written({f"{PREFIX}model": (STRING, text("gpt2"))}), "tokens is missing"),
    "tokens that are one text": (
        written({f"{PREFIX}model": (STRING, text("gpt2")), f"{PREFIX}tokens": (STRING, text("a"))}),
        "tokens is 'a'; it must be a list",
    ),
    "tokens that are numbers": (
        written(
            {f"{PREFIX}model": (STRING, text("gpt2")), f"{PREFIX}tokens": (ARRAY, array(4, 1, bytes(4)))}
        ),
        "tokens is array([0]",
    ),
    "a token that is not UTF-8": (
        vocabulary("llama", [b"a", b"\xff"]),
        "tokens contains a string that is not UTF-8",
    ),
    "a token twice": (vocabulary("llama", ["a", "b", "a"]), "tokens contains 'a' twice"),
    "a model that is a number": (
        written({f"{PREFIX}model": (4, bytes(4)), f"{PREFIX}tokens": (ARRAY, texts("a"))}),
        "model is 0; supported are gpt2",
    ),
    "fewer scores than tokens": (
        vocabulary("llama", ["a", "b"], scores=(ARRAY, array(6, 1, bytes(4)))),
        "scores is array([0.]",
    ),
    "scores that are texts": (
        vocabulary("llama", _ONE, scores=(ARRAY, texts("\1" * 1000))),
        "scores is a list of 1 texts; it must have 1 numbers",
    ),
    "fewer kinds than tokens": (
        vocabulary("llama", ["a", "b"], token_type=(ARRAY, array(5, 1, bytes(4)))),
        "it must have 2 numbers",
    ),
    "one kind for all": (vocabulary("llama", _ONE, token_type=(5, bytes(4))), "token_type is 0; it must"),
    "no merges": (vocabulary("gpt2", _ONE), "merges is missing"),
    "merges that are not UTF-8": (
        vocabulary("gpt2", _ONE, merges=(ARRAY, texts(b"\xff a"))),
        "merges contains a string that is not UTF-8",
    ),
    "an unknown pre-tokenizer": (
        vocabulary("gpt2", _ONE, merges=(ARRAY, texts("a a")), pre=(STRING, text("\n" * 1000))),
        r"pre is '\n\n",
    ),
    "a flag that is a number": (
        vocabulary("llama", _ONE, add_space_prefix=(4, bytes(4))),
        "add_space_prefix is 0; it must be true or false",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_invalid_vocabulary_is_a_one_line_error(what: str, tmp_path: Path) -> None:
    raw, metadata = WRONG[what]
    message = refused(tmp_path, raw)
    assert metadata in message and len(message) < 1000


def test_nested_prefixes_take_bounded_memory(tmp_path: Path) -> None:
    """The merges of 2,000 such tokens would take 2.7 GB of text."""
    raw = vocabulary("llama", ["a" * length for length in range(1, 2001)])
    tracemalloc.start()
    message = refused(tmp_path, raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5 * len(raw) and "tokens of up to 2000 characters" in message


def test_a_huge_token_takes_bounded_time(tmp_path: Path) -> None:
    """A token can only be a merge of two tokens with its total length."""
    raw = vocabulary("llama", ["a", "b", "ab", "ab" * 200_000])
    start = time.process_time()
    tokenizer = made(tmp_path, raw)
    assert time.process_time() - start < 1  # all splits would take 80 GB of text
    assert tokenizer.token_to_id("ab" * 200_000) == 3


def test_a_vocabulary_of_runs_keeps_its_merges(tmp_path: Path) -> None:
    """Files of Gemma have runs of up to 31 spaces and lines; all splits of a run are merges."""
    runs = [each * length for each in "▁\n" for length in range(1, 32)]
    scores = struct.pack(f"<{len(runs)}f", *(len(run) for run in runs))
    flags = {"add_space_prefix": (7, b"\0"), "add_bos_token": (7, b"\0")}
    tokenizer = made(
        tmp_path, vocabulary("llama", runs, scores=(ARRAY, array(6, len(runs), scores)), **flags)
    )
    assert tokenizer.encode(" " * 31 + "\n" * 31).tokens == ["▁" * 31, "\n" * 31]


_TEXTS = st.one_of(
    st.text(max_size=6),
    st.text("ab▁", min_size=1, max_size=4),
    st.sampled_from(["<s>", "<0x0A>", "[EMPTY_1]", "▁", " ", "a b", "\0"]),
    st.just(b"\xff\xc3"),
    st.builds(lambda each, times: each * times, st.sampled_from(["a", "ab", "é"]), st.integers(1, 500)),
)
_NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 6, 7, 255])
_WIDE = st.sampled_from([0, 1, 2, (1 << 31) - 1, (1 << 32) - 1])


def _list_of(values: st.SearchStrategy[list[str | bytes]]) -> st.SearchStrategy[tuple[int, bytes]]:
    return values.map(lambda each: (ARRAY, texts(*each)))


_LISTS = _list_of(st.lists(_TEXTS, max_size=12))
_TOKENS = _list_of(
    st.lists(_TEXTS.filter(lambda each: isinstance(each, str)), min_size=1, max_size=12, unique=True)
)
_COUNTS = st.sampled_from([12, 12, 12, 14, 3, 0])
_KINDS = _COUNTS.flatmap(lambda count: st.lists(_NUMBERS, min_size=count, max_size=count)).map(
    lambda each: (ARRAY, array(0, len(each), bytes(each)))
)
_SCORES = _COUNTS.flatmap(lambda count: st.lists(st.floats(width=32), min_size=count, max_size=count)).map(
    lambda each: (ARRAY, array(6, len(each), struct.pack(f"<{len(each)}f", *each)))
)
_ID = st.one_of(_WIDE.map(lambda each: (4, struct.pack("<I", each))), st.just((5, struct.pack("<i", -1))))
_FLAG = st.sampled_from([(7, b"\0"), (7, b"\1")])
_ANYTHING = st.one_of(
    *(_LISTS, _KINDS, _SCORES, _ID, _FLAG, _TEXTS.map(lambda each: (STRING, text(each)))),
    st.just((12, struct.pack("<d", float("nan")))),
)
_PRE = st.sampled_from(["default", "llama-bpe", "qwen2", "deepseek-llm", "unknown"])
_RIGHT = {
    "tokens": _TOKENS,
    "token_type": _KINDS,
    "scores": _SCORES,
    "merges": _LISTS,
    "pre": _PRE.map(lambda each: (STRING, text(each))),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), _FLAG),
    **{f"{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}


_MAY_BE_SLOW = [HealthCheck.too_slow]
"""The first examples may be slow: other tests run in parallel."""


@st.composite
def _metadata(draw: st.DrawFn) -> dict[str, tuple[int, bytes]]:
    """Draw keys, most with a value of their type, some with an arbitrary one."""
    model = draw(st.sampled_from(["llama", "gpt2"]))
    metadata = {f"{PREFIX}model": (STRING, text(model))}
    odd = draw(st.none() | st.sampled_from(sorted(_RIGHT)))
    missing = draw(st.sets(st.sampled_from(sorted(_RIGHT.keys() - {"tokens", "merges"})), max_size=8))
    for name, strategy in _RIGHT.items():
        if name == odd or name not in missing:
            metadata[f"{PREFIX}{name}"] = draw(_ANYTHING if name == odd else strategy)
    if draw(st.integers(0, 3)) == 0:
        named = draw(st.sampled_from(["", ".tool_use", ".a/../b", f".{'x' * 80}", "."]))
        metadata[f"tokenizer.chat_template{named}"] = (STRING, text(draw(st.text(max_size=9))))
    return metadata


def _check(metadata: Mapping[str, tuple[int, bytes]]) -> bool:
    """Return whether a file with these keys has a tokenizer; otherwise check its one-line error. Memory follows the file."""
    raw, tokenizer = written(metadata), None
    for last in (False, False, True):  # allocations of other threads are counted too
        with tempfile.TemporaryDirectory() as folder:
            tracemalloc.start()
            try:
                tokenizer = made(Path(folder), raw)
            except ConfigError as error:
                assert str(error).startswith(f"{folder}/model.gguf: ") and "\n" not in str(error)
            finally:
                _, most = tracemalloc.get_traced_memory()
                tracemalloc.stop()
        if most < TIMES_THE_FILE * len(raw) + ANY_FILE:
            break
        assert not last, (most, len(raw))
    if tokenizer is not None:
        tokenizer.encode("ab ▁aé\n")
    return tokenizer is not None


@settings(max_examples=60, deadline=None, suppress_health_check=_MAY_BE_SLOW)
@given(metadata=_metadata())
def test_any_metadata_is_a_tokenizer_or_a_one_line_error(metadata: dict[str, tuple[int, bytes]]) -> None:
    _check(metadata)


@pytest.mark.whole
@settings(max_examples=10_000, deadline=None, suppress_health_check=_MAY_BE_SLOW, print_blob=True)
@given(metadata=_metadata())
def test_more_metadata_is_a_tokenizer_or_a_one_line_error(metadata: dict[str, tuple[int, bytes]]) -> None:
    _check(metadata)


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_many_small_tokens_take_proportional_memory(kind: int, tmp_path: Path) -> None:
    """The most expensive tokens per byte are short texts, merged or special."""
    tokens = [f"{number:x}" for number in range(10_000)]
    raw = vocabulary("llama", tokens, token_type=(ARRAY, array(0, len(tokens), bytes([kind]) * len(tokens))))
    tracemalloc.start()
    made(tmp_path, raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < TIMES_THE_FILE * len(raw)
