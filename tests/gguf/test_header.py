"""Headers of GGUF files: valid ones are parsed, and an invalid one is a one-line error with file, byte and subject."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quintet.executor.checkpoints.gguf.header import MAX_STRINGS, Strings, read_header
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.wire.errors import ConfigError
from tests.gguf.bytes_of_files import ARRAY, Q4_K, STRING, array, file_of, key, tensor, text

NAME = key("general.architecture", STRING, text("llama"))
WHOLE = file_of(
    [
        NAME,
        key("a.count", 4, struct.pack("<I", 7)),
        key("a.eps", 6, struct.pack("<f", 1e-6)),
        key("a.yes", 7, b"\1"),
        key("words", ARRAY, array(STRING, 2, text("a") + text("é"))),
        key("scores", ARRAY, array(6, 2, struct.pack("<2f", 1.5, -2.0))),
    ],
    [tensor("x.weight", (4, 3)), tensor("y.weight", (256, 2), Q4_K, 64)],
    bytes(64 + 288),
)


def written(folder: Path, raw: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


def test_a_header_is_parsed(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, WHOLE))
    words, scores = header.metadata.pop("words"), header.metadata.pop("scores")
    assert header.metadata == {"general.architecture": "llama", "a.count": 7, "a.eps": 1e-6, "a.yes": True}
    assert isinstance(words, Strings) and words.texts() == ["a", "é"]
    assert isinstance(scores, np.ndarray) and scores.tolist() == [1.5, -2.0]
    x, y = header.tensors["x.weight"], header.tensors["y.weight"]
    assert (x.type.name, x.shape, x.num_bytes, x.begin) == ("F32", (3, 4), 48, len(WHOLE) - 64 - 288)
    assert (y.type.name, y.shape, y.num_bytes, y.begin) == ("Q4_K", (2, 256), 288, len(WHOLE) - 288)


_DATA = bytes(64)
TIMES_THE_FILE = 12
"""Memory per byte of the file. A tensor takes at least 33 bytes in the file, and ten times that as parsed name, shape,
offset and index entry. While parsed, a key takes seven times its bytes, a text six times.
"""
ANY_FILE = 1 << 15
"""Bytes that parsing any file takes."""
WRONG = {
    "no file of GGUF": (file_of(magic=b"PK\3\4"), "at byte 0, the file begins with b'PK"),
    "shorter than a header": (b"GGUF\3", "only 5 bytes, less than a header"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian files"),
    "the first version": (file_of(version=1), "unsupported version 1"),
    "more keys than bytes": (file_of([NAME], num_keys=1 << 62), "claims 4611686018427387904 keys"),
    "more tensors than bytes": (file_of(num_tensors=(1 << 64) - 1), "claims 18446744073709551615 tensors"),
    "a key twice": (file_of([NAME, NAME]), "'general.architecture' is duplicated"),
    "a key that is no text": (file_of([key(b"\xff\xfe", 4, bytes(4))]), "key number 1 is not UTF-8 text"),
    "a text beyond the file": (
        file_of([text("k") + struct.pack("<IQ", STRING, 1 << 40)]),
        "'k' claims a string of 1099511627776 bytes",
    ),
    "a key longer than any": (
        file_of([key("k" * (1 << 17), 4, bytes(4))]),
        "bytes; at most 65536 are allowed",
    ),
    "more strings than any model has": (
        file_of([key("k", ARRAY, array(STRING, (1 << 22) + 1, bytes(8 << 22)))]),
        "claims 4194305 strings; all arrays together may have at most 4194304",
    ),
    "a kind that is not known": (file_of([key("k", 99, b"")]), "'k' has the unknown type 99"),
    "an array of arrays": (file_of([key("k", ARRAY, array(ARRAY, 1, bytes(12)))]), "an array of arrays"),
    "an array of nothing known": (
        file_of([key("k", ARRAY, array(77, 1, b""))]),
        "an array of the unknown type 77",
    ),
    "an array beyond the file": (
        file_of([key("k", ARRAY, array(10, 1 << 61, b""))]),
        "'k' claims 2305843009213693952 values of 8 bytes",
    ),
    "strings beyond the file": (
        file_of([key("k", ARRAY, array(STRING, 3, text("a")))]),
        "truncated or damaged file; download it again",
    ),
    "a string of an array beyond the file": (
        file_of([key("k", ARRAY, array(STRING, 1, struct.pack("<Q", (1 << 64) - 1)))]),
        "'k' continues, beyond the file",
    ),
    "a truth value of 2": (file_of([key("k", 7, b"\2")]), "neither 0 nor 1"),
    "an alignment that is no power of two": (
        file_of([key("general.alignment", 4, struct.pack("<I", 48))]),
        "general.alignment is 48",
    ),
    "an alignment that is a text": (
        file_of([key("general.alignment", STRING, text("32"))]),
        "alignment is '32'",
    ),
    "a tensor twice": (
        file_of([], [tensor("x", (4,)), tensor("x", (4,), offset=32)], _DATA),
        "'x' is duplicated",
    ),
    "a tensor of no dimensions": (file_of([], [tensor("x", ())], _DATA), "'x' has 0 dimensions"),
    "a tensor of five": (file_of([], [tensor("x", (1, 1, 1, 1, 1))], _DATA), "'x' has 5 dimensions"),
    "a tensor of nothing": (file_of([], [tensor("x", (4, 0))], _DATA), "'x' has the shape [0, 4]"),
    "2^63 numbers": (file_of([], [tensor("x", (1 << 32, 1 << 31))], _DATA), "'x' has the shape"),
    "2^256 numbers": (file_of([], [tensor("x", ((1 << 64) - 1,) * 4)], _DATA), "'x' has the shape"),
    "half a block": (
        file_of([], [tensor("x", (128, 4), Q4_K)], bytes(600)),
        "rows must be whole blocks of 256",
    ),
    "an unknown type": (file_of([], [tensor("x", (4,), 200)], _DATA), "the unsupported type 200 (unknown)"),
    "a withdrawn type": (file_of([], [tensor("x", (32,), 31)], _DATA), "unsupported type 31 (Q4_0_4_4)"),
    "a tensor that lies askew": (
        file_of([], [tensor("x", (4,), offset=4)], _DATA),
        "not a multiple of the alignment",
    ),
    "a tensor beyond the file": (
        file_of([], [tensor("x", (4,), offset=64)], _DATA),
        "the file is truncated or damaged",
    ),
    "an offset of 2^63": (
        file_of([], [tensor("x", (4,), offset=1 << 63)], _DATA),
        "the file is truncated or damaged",
    ),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "tensors that share bytes": (
        file_of([], [tensor("x", (16,)), tensor("y", (4,), offset=32)], _DATA),
        "'y' begins within tensor 'x'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_invalid_header_is_a_one_line_error(what: str, tmp_path: Path) -> None:
    raw, expected = WRONG[what]
    path = written(tmp_path, raw)
    with pytest.raises(ConfigError) as raised:
        read_header(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: not a readable GGUF file: at byte ") and expected in message
    assert "\n" not in message and len(message) < 500


def test_every_truncated_file_is_rejected(tmp_path: Path) -> None:
    for size in range(len(WHOLE)):
        with pytest.raises(ConfigError, match="at byte"):
            read_header(written(tmp_path, WHOLE[:size]))


def _flipped(raw: bytes, places: list[tuple[int, int]]) -> bytes:
    changed = bytearray(raw)
    for place, value in places:
        changed[place % len(raw)] = value
    return bytes(changed)


def _check_bounded(path: Path, raw: bytes) -> None:
    """Check that the file is parsed or rejected, with memory proportional to its size."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        read_header(path)
    except ConfigError as error:
        assert "\n" not in str(error)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < TIMES_THE_FILE * len(raw) + ANY_FILE


_MANY = 5000
_ALIGNED = key("general.alignment", 4, struct.pack("<I", 1))
MANY = {
    "keys": file_of([key(f"{number:x}", 0, b"\1") for number in range(_MANY)]),
    "keys of empty arrays": file_of([key(f"{number:x}", ARRAY, array(0, 0, b"")) for number in range(_MANY)]),
    "tensors": file_of(
        [_ALIGNED],
        [tensor(f"{number:x}", (1,), offset=4 * number) for number in range(_MANY)],
        bytes(4 * _MANY),
    ),
    "empty strings": file_of([key("k", ARRAY, array(STRING, _MANY, bytes(8 * _MANY)))]),
    "a text": file_of([key("k", STRING, text("\U0001f600" + "a" * 100_000))]),
    "a text that is not UTF-8": file_of([key("k", STRING, text(b"a" * 100_000 + b"\xff"))]),
    "a text for a number": file_of([key("general.alignment", STRING, text("\1" * 100_000))]),
}


@pytest.mark.parametrize("what", MANY)
def test_a_file_of_expensive_entries_takes_proportional_memory(what: str, tmp_path: Path) -> None:
    _check_bounded(tmp_path / "many.gguf", MANY[what])


_SHORT = WHOLE[: -64 - 288]
_CHANGES = st.lists(st.tuples(st.integers(0, len(_SHORT) - 1), st.integers(0, 255)), max_size=6)
_WORDS = st.lists(
    st.tuples(st.integers(0, len(_SHORT) - 8), st.sampled_from([0, 1, 255, 1 << 31, 1 << 62, (1 << 64) - 1])),
    max_size=3,
)


def _fuzz(folder: Path, changes: list[tuple[int, int]], words: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray(_flipped(WHOLE, changes))
    for place, word in words:
        raw[place : place + 8] = struct.pack("<Q", word)
    _check_bounded(folder / "fuzzed.gguf", bytes(raw[: len(raw) - cut]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=_CHANGES, words=_WORDS, cut=st.integers(0, 400))
def test_changed_bytes_are_parsed_or_rejected(tmp_path: Path, changes, words, cut) -> None:
    _fuzz(tmp_path, changes, words, cut)


@pytest.mark.whole
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=_CHANGES, words=_WORDS, cut=st.integers(0, 400))
def test_more_changed_bytes_are_parsed_or_rejected(tmp_path: Path, changes, words, cut) -> None:
    _fuzz(tmp_path, changes, words, cut)


def test_the_number_of_strings_is_limited(tmp_path: Path) -> None:
    """A sparse file as long as its claims: parsing ends at once, without reading them."""
    path = tmp_path / "sparse.gguf"
    count = MAX_STRINGS + 1
    path.write_bytes(file_of([key("k", ARRAY, array(STRING, count, b""))]))
    os.truncate(path, 8 * count + 1000)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"claims {count} strings"):
        read_header(path)
    assert time.monotonic() - started < 5


def _split(folder: Path, changes: dict[int, list[bytes]] | None = None, count: int = 2) -> Path:
    for number in range(count):
        keys = [
            NAME,
            key("split.no", 2, struct.pack("<H", number)),
            key("split.count", 2, struct.pack("<H", count)),
            key("split.tensors.count", 5, struct.pack("<i", count)),
        ]
        raw = file_of((changes or {}).get(number, keys), [tensor(f"x{number}", (4,))], bytes(16))
        written(folder, raw, f"m-{number + 1:05}-of-{count:05}.gguf")
    return folder / f"m-00001-of-{count:05}.gguf"


def test_all_parts_are_found_from_any_part(tmp_path: Path) -> None:
    first = _split(tmp_path, count=3)
    for name in ("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"):
        parts = read_parts(tmp_path / name)
        assert parts.path == first and [name for name, _ in parts.tensors()] == ["x0", "x1", "x2"]


def test_parts_of_different_models_are_rejected(tmp_path: Path) -> None:
    second = _split(tmp_path).with_name("m-00002-of-00002.gguf")
    alone = written(tmp_path, _split(tmp_path).read_bytes(), "renamed.gguf")
    with pytest.raises(ConfigError, match=r"split\.count is 2"):
        read_parts(alone)
    right = second.read_bytes()
    second.unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf: is missing"):
        read_parts(tmp_path / "m-00001-of-00002.gguf")
    second.write_bytes((tmp_path / "m-00001-of-00002.gguf").read_bytes())
    with pytest.raises(ConfigError, match=r"split\.no is 0, not 1"):
        read_parts(second)
    second.write_bytes(right.replace(b"x1", b"x0"))
    with pytest.raises(ConfigError, match="tensor 'x0' is also in m-00001"):
        read_parts(second)
