"""A rank reads only the weights that it keeps: pages with other bytes only are fenced, and reading one ends the process.

The tests repeat each rank's share by the names of the checkpoint. Of matrices split by columns, pages without a kept column
are fenced too. The rows of the feed-forwards are several pages long for that.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.models.checkpoints.fenced_weights import Ending, Fenced, Ranges
from tests.models.distributed.ranks import config_of
from tests.models.random_checkpoints import Row, of_transformers, write_checkpoint

from quintet.executor.checkpoints.weights.files import packed_file
from quintet.executor.checkpoints.weights.header import Entry, read_header
from quintet.executor.checkpoints.weights.read_ahead import files_ahead
from quintet.wire.config import EngineConfig, HostsConfig, Quantization

ROOT = Path(__file__).resolve().parents[3]
WIDE = {"vocab_size": 512, "intermediate_size": 4096, "head_dim": 64, "tie_word_embeddings": False}
LLAMA = of_transformers("LlamaConfig", **WIDE)
MIXTRAL = of_transformers("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **WIDE)
MAMBA = of_transformers("MambaConfig", intermediate_size=4096, vocab_size=512, tie_word_embeddings=False)
BY_ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|lm_head)\.weight$")
EXPERT = re.compile(r"experts\.(\d+)\.")

Unkept = Callable[[str, Entry, int], Ranges]
"""From a tensor's name, its location, and a rank of two, to its byte ranges of the other rank alone."""


def rows(entry: Entry, rank: int) -> Ranges:
    """The other half of its rows."""
    half = entry.num_bytes // 2
    return [(0, half) if rank else (half, entry.num_bytes)]


def columns(entry: Entry, rank: int) -> Ranges:
    """The other half of each row."""
    wide = entry.num_bytes // entry.shape[0]
    begin = 0 if rank else wide // 2
    return [(row * wide + begin, row * wide + begin + wide // 2) for row in range(entry.shape[0])]


def of_ranks(name: str, entry: Entry, rank: int) -> Ranges:
    if BY_ROWS.search(name):
        return rows(entry, rank)
    return columns(entry, rank) if name.endswith("down_proj.weight") else []


def of_ranks_of_states(name: str, entry: Entry, rank: int) -> Ranges:
    """Half of the channels and half of the gates stored after them."""
    if name.endswith("in_proj.weight"):
        half = entry.num_bytes // 2
        each = rows(Entry(entry.dtype, entry.shape, entry.begin, half), rank)
        return [(at + begin, at + end) for at in (0, half) for begin, end in each]
    if name.endswith(("x_proj.weight", "out_proj.weight")):
        return columns(entry, rank)
    by_rows = ("dt_proj.weight", "conv1d.weight", "A_log", "lm_head.weight")
    return rows(entry, rank) if name.endswith(by_rows) else []


def of_ranks_of_experts(name: str, entry: Entry, rank: int) -> Ranges:
    expert = EXPERT.search(name)
    if expert is None:
        return of_ranks(name, entry, rank)
    return [] if int(expert[1]) // 2 == rank else [(0, entry.num_bytes)]


def of_stages(name: str, entry: Entry, rank: int) -> Ranges:
    """The first stage has two of three layers, since the output layer counts too."""
    layer = re.search(r"layers\.(\d+)\.", name)
    first = int(layer[1]) < 2 if layer else "embed" in name
    return [] if first == (rank == 0) else [(0, entry.num_bytes)]


class Case(msgspec.Struct, frozen=True):
    """A model and its division by two."""

    row: Row
    unkept: Unkept
    size: int = 1
    stages: int = 1
    experts: bool = False
    quantization: Quantization = "none"


CASES = {
    "ranks": Case(LLAMA, of_ranks, size=2),
    "ranks that round": Case(LLAMA, of_ranks, size=2, quantization="int8"),
    "ranks of whole experts": Case(MIXTRAL, of_ranks_of_experts, size=2, experts=True),
    "ranks of states": Case(MAMBA, of_ranks_of_states, size=2),
    "stages": Case(LLAMA, of_stages, stages=2),
}


def entries_in(folder: Path) -> Mapping[str, Entry]:
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        return read_header(path, file, path.stat().st_size).entries


def fenced(folder: Path, case: Case, rank: int) -> Fenced:
    """Return the rank's load job for the checkpoint in the folder."""
    config = config_of(
        *(folder, case.size, case.stages, "float32", case.quantization, "auto", None), experts=case.experts
    )
    entries = entries_in(folder)
    return Fenced(config, rank, {name: case.unkept(name, each, rank) for name, each in entries.items()})


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[Ending]]:
    """Return, for each case, the exits of its two ranks, and of a process that loads the whole model with the same fences."""
    requested = []
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        write_checkpoint(case.row, folder)
        first, second = (fenced(folder, case, rank) for rank in range(2))
        alone = fenced(folder, Case(case.row, case.unkept, quantization=case.quantization), 0)
        requested += [first, second, alone]
    run = subprocess.run(
        [sys.executable, "-m", "tests.models.checkpoints.fenced_weights"],
        input=msgspec.json.encode(requested), capture_output=True, check=True, cwd=ROOT,
    )  # fmt: skip
    sys.stderr.write(run.stderr.decode())  # stacks of forbidden reads
    found = msgspec.json.decode(run.stdout, type=list[Ending])
    return {name: found[3 * i : 3 * i + 3] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_rank_reads_only_the_pages_that_it_keeps(name: str, endings: Mapping[str, Sequence[Ending]]) -> None:
    assert [each.status for each in endings[name][:2]] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_fences_end_a_process_that_loads_the_whole_model(
    name: str, endings: Mapping[str, Sequence[Ending]]
) -> None:
    """About a third of every checkpoint at least is fenced."""
    first, second, alone = endings[name]
    assert alone.status == -signal.SIGSEGV
    assert min(each.num_fenced_bytes for each in (first, second)) > 3_000_000, endings[name]


def on_hosts(config: EngineConfig, count: int) -> EngineConfig:
    hosts = HostsConfig(count=count, address="127.0.0.1:1", key_file="")
    executor = msgspec.structs.replace(config.executor, hosts=hosts)
    return msgspec.structs.replace(config, executor=executor)


def test_checkpoint_is_prefetched_if_one_host_needs_all_of_it(tmp_path: Path) -> None:
    """Only rank 0 needs the weights packed for it."""
    write_checkpoint(LLAMA, tmp_path)
    config = fenced(tmp_path, CASES["stages"], 0).config
    assert list(files_ahead(config)) == [tmp_path / "model.safetensors"]
    assert not files_ahead(on_hosts(config, 2))

    packed = packed_file(tmp_path, tmp_path, "none", "float32", "rank 0")
    packed.touch()
    executor = msgspec.structs.replace(config.executor, packed_cache=str(tmp_path))
    config = on_hosts(msgspec.structs.replace(config, executor=executor), 2)
    assert list(files_ahead(config, "rank 0")) == [packed]
    assert not files_ahead(config, "rank 1")
