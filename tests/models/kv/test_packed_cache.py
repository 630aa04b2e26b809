"""The file of packed weights: used if it is complete and of this checkpoint, else rewritten."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tests.models.checkpoints.test_weights import tiny

from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.backends.registry import make_worker

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

PROMPT = [5, 6, 7]


class Server:
    """One model, started repeatedly with the same folder for packed weights."""

    def __init__(self, served: Any, folder: Path) -> None:
        self._served = served
        self.folder = folder
        self.expected = served.greedy([PROMPT], 8)[0]

    @property
    def file(self) -> Path:
        """Return the one file in the folder."""
        (path,) = self.folder.iterdir()
        return path

    def start(self, quantization: str = "none") -> list[int]:
        """Load the model again; return its tokens."""
        served = self._served
        executor = msgspec.structs.replace(
            served.config.executor, packed_cache=str(self.folder), quantization=quantization
        )
        served.core.worker = make_worker(msgspec.structs.replace(served.config, executor=executor))
        request = served.core.add(PROMPT, max_tokens=8)
        served.core.run()
        outputs: list[int] = request.outputs
        return outputs


@pytest.fixture
def server(serve: Callable[..., Any], tmp_path: Path) -> Server:
    config = tiny()
    config.tie_word_embeddings = True
    return Server(serve(config), tmp_path / "packed")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeight]:
    """Every packed weight, once for each of its parts."""
    filled = []
    fill = PackedWeight.fill

    def counting(self: PackedWeight, source: torch.Tensor, first_column: int = 0) -> None:
        filled.append(self)
        fill(self, source, first_column)

    monkeypatch.setattr(PackedWeight, "fill", counting)
    return filled


def test_parts_of_one_tensor_are_cached(
    serve: Callable[..., Any], tmp_path: Path, packed: list[PackedWeight]
) -> None:
    config = transformers.Phi3Config(
        **{key: getattr(tiny(), key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    server = Server(serve(config), tmp_path / "packed")
    assert server.start() == server.expected
    assert packed
    packed.clear()
    assert server.start() == server.expected
    assert not packed
    described = server.file.read_bytes()
    assert b"qkv_proj[0/1/96]" in described and b"gate_up_proj[48/1/96]" in described


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_second_start_packs_nothing_and_gives_the_same_tokens(
    quantization: str, server: Server, packed: list[PackedWeight]
) -> None:
    first = server.start(quantization)
    assert packed
    packed.clear()
    assert server.start(quantization) == first
    assert not packed


def test_each_quantization_has_its_own_file(server: Server) -> None:
    server.start("none")
    server.start("int8")
    assert len(list(server.folder.iterdir())) == 2
    assert server.start("none") == server.expected


def change_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b""), "not a packed-cache file"),
        (lambda path: path.write_bytes(b"x" * 100_000), "not a packed-cache file"),
        (lambda path: change_byte(path, 24), "another version"),
        (lambda path: change_byte(path, 60), "another checkpoint"),
        (lambda path: os.truncate(path, 30), "not a packed-cache file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes"),
        (lambda path: os.truncate(path, path.stat().st_size + 1), "bytes"),
    ],
    ids=["empty", "foreign", "version", "header", "cut in the header", "cut at the end", "too long"],
)
def test_invalid_file_is_rewritten(
    damage: Callable[[Path], object],
    words: str,
    server: Server,
    packed: list[PackedWeight],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.start()
    whole = server.file.read_bytes()
    damage(server.file)
    packed.clear()
    with caplog.at_level(logging.INFO, "quintet"):
        assert server.start() == server.expected
    assert packed
    assert sum(words in line for line in caplog.messages) == 1
    assert server.file.read_bytes() == whole


def test_changed_checkpoint_is_packed_again(
    server: Server, tmp_path: Path, packed: list[PackedWeight]
) -> None:
    server.start()
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    packed.clear()
    assert server.start() == server.expected
    assert packed


def test_read_only_folder_is_a_warning(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.folder.write_text("a file, not a folder")
    assert server.start() == server.expected
    (line,) = [record for record in caplog.records if "packed" in record.message]
    assert line.levelname == "WARNING" and str(server.folder) in line.message


def test_folder_at_the_path_of_the_file_is_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    path = server.file
    path.unlink()
    path.mkdir()
    assert server.start() == server.expected
    assert "packed cache not written" in caplog.text
    assert list(server.folder.iterdir()) == [path]
