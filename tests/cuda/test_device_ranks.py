"""Tensor parallelism over devices gives the tokens of one device: the whole worker, all kernels emulated, concurrent ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.cuda.device_ranks import leading_worker
from tests.cuda.rank_devices import devices_of, peers_of, run_concurrently
from tests.cuda.test_worker_bits import Bits, ask, bits_of
from tests.models.distributed.ranks import config_of
from tests.models.equality import GREEDY, Dtype, few_blocks, load, run, with_blocks
from tests.models.random_checkpoints import Expectation, expectations, write_checkpoint
from tests.models.rows import dense, falcon, gemma, gpt, latent, llama, moe, states
from tests.models.test_embeds import mixed
from tests.models.test_engine import CoreAndWorker, changed

from quintet.executor.backends.cuda.device import Kernel, Size
from quintet.executor.backends.cuda.graphs import GraphSize
from quintet.executor.backends.cuda.ops.collectives import (
    EXCHANGE,
    NO_TIMEOUT_NS,
    WAIT_TIMEOUT_S,
    Peers,
    RankDesyncError,
)
from quintet.executor.backends.cuda.ops.tables import PackedPlan
from quintet.executor.backends.cuda.ranks.communicator import (
    ONE_SHOT_BYTES,
    DeviceCommunicator,
    communicator_of,
    open_device_ranks,
)
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster, RankReceiver, StepOrder
from quintet.executor.embeds import StepEmbeds
from quintet.executor.model_config.share import Share
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

KINDS = {
    "llama": llama.ROWS["llama"],
    "queries and keys normed as one": dense.ROWS["olmo2"],
    "stacked, with biases and learned positions": gpt.ROWS["gpt2"],
    "columns of experts": moe.ROWS["mixtral"],
}
MORE_KINDS = {
    "fewer KV heads than four ranks": falcon.ROWS["falcon 40b"],
    "latents": latent.ROWS["minicpm3"],
    "two rotations": gemma.ROWS["gemma3"],
    "soft caps": gemma.ROWS["gemma2"],
    "slopes": falcon.ROWS["bloom"],
    "experts of groups, latents": latent.ROWS["deepseek v3"],
    "states of channels": states.ROWS["lfm2"],
    "channels that choose together": states.ROWS["mamba"],
    "heads that are normed as one": states.ROWS["mamba2, one group, limits"],
    "states beside attention": states.ROWS["falcon h1, normed first"],
    "the delta rule": states.ROWS["qwen 3.5"],
}


def rank_config(
    folder: Path,
    size: int = 2,
    dtype: Dtype = "float32",
    swap_space: float | None = None,
    **executor: Any,
) -> EngineConfig:
    config = config_of(folder, size, 1, dtype, "none", "auto", swap_space, experts=False)
    config = changed(config, max_num_seqs=4, max_num_batched_tokens=23)
    return msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, **executor))


def made(kind: str, folder: Path, lengths: tuple[int, ...] = (1, 9, 17, 29)) -> list[Expectation]:
    row = KINDS.get(kind) or MORE_KINDS[kind]
    return expectations(write_checkpoint(row, folder), lengths)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(name, marks=pytest.mark.whole) for name in MORE_KINDS)]
)
def test_tokens_equal_those_of_one_device(kind: str, size: int, tmp_path: Path) -> None:
    """Prompts in chunks next to rows that decode in graphs; every rank finds the tokens drawn in the previous step."""
    if (kind, size) == ("experts of groups, latents", 4):
        pytest.skip("parts have rows of 10 numbers, which are refused before anything is loaded")
    expected = made(kind, tmp_path)
    config = rank_config(tmp_path, size)
    with leading_worker(config) as worker:
        driver = CoreAndWorker(config, worker)
        for i, each in enumerate(expected):
            driver.admit(i, each.prompt, GREEDY)
        driver.run()
    assert [driver.outputs[i] for i in range(len(expected))] == [each.outputs for each in expected]


@pytest.mark.whole
def test_all_ranks_swap_blocks_and_accept_embeds(tmp_path: Path) -> None:
    """Every other prompt is given as embeddings; KV memory is too small for all, so blocks are swapped out and in."""
    expected = made("llama", tmp_path, (1, 3, 9, 13, 14, 15, 17, 29))
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    config = changed(rank_config(tmp_path, swap_space=2**-10), max_num_seqs=8, max_num_batched_tokens=64)
    config = with_blocks(config, few_blocks(config))
    with leading_worker(config, captured=False) as worker:
        driver = CoreAndWorker(config, worker)
        for i, prompt in enumerate(mixed(table, [each.prompt for each in expected])):
            driver.admit(i, prompt, GREEDY)
        driver.run()
    assert [driver.outputs[i] for i in range(len(expected))] == [each.outputs for each in expected]
    assert driver.engine.state is not None and driver.engine.state.counters.swap_in_blocks > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=6, repetition_penalty=1.3),
    ],
    ids=["log-probabilities", "penalties"],
)
def test_requests_that_recompute_logits(params: SamplingParams, tmp_path: Path) -> None:
    prompts = [each.prompt for each in made("llama", tmp_path)]
    config = rank_config(tmp_path)
    whole = load(tmp_path)
    expected = run(whole, changed(whole.config), prompts, params=params)
    with leading_worker(config, captured=False) as worker:
        driver = CoreAndWorker(config, worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i, prompt, params)
        driver.run()
    assert [driver.outputs[i] for i in range(len(prompts))] == expected.outputs


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_do_not_depend_on_the_batch(dtype: Dtype, tmp_path: Path) -> None:
    """With ``--batch-invariant``: sums of ranks are added in one order, for every message size."""
    made("llama", tmp_path)
    config = rank_config(tmp_path, dtype=dtype, batch_invariant=True)
    config = changed(config, max_num_seqs=4, max_num_batched_tokens=128)
    bits: dict[str, dict[int, Bits]] = {}
    with leading_worker(config) as worker:
        bits["together"] = bits_of(ask(config, worker, (4, 5, 6)))
        bits["alone"] = bits_of(ask(config, worker, (5,)))
        in_chunks = changed(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
        bits["in chunks"] = bits_of(ask(in_chunks, worker, (4, 5, 6)))
    assert bits["alone"][5] == bits["together"][5]
    assert bits["in chunks"] == bits["together"]


def test_broadcast_of_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    """Also messages of several parts that exceed the mailbox."""
    write_checkpoint(KINDS["llama"], tmp_path)
    config = rank_config(tmp_path)
    with (tmp_path / "memory").open("w+b") as memory:
        first, second = (open_device_ranks(config, memory.fileno(), rank) for rank in range(2))
        words = np.arange(400_000, dtype=np.int32)
        packed = PackedPlan(3, 9, 4, 2, len(words), slice(10, 14), slice(14, 14), slice(14, 20), slice(0, 0))
        embeds = StepEmbeds(torch.tensor([1, 4]), torch.randn(2, 8).bfloat16())

        def send_all() -> None:
            second_is_there.wait()
            broadcaster = RankBroadcaster(first)
            broadcaster.step(words, packed, embeds, GraphSize(4, 1))
            broadcaster.logits(np.array([5, 6], np.int64))

        second_is_there = threading.Event()
        telling = threading.Thread(target=send_all, daemon=True)
        telling.start()
        second.done()
        second_is_there.set()
        receiver = RankReceiver(second)
        step, logits = receiver.next(), receiver.next()
        telling.join()
    assert isinstance(step, StepOrder) and step.packed == packed and step.graph_size == GraphSize(4, 1)
    assert step.words == words.tobytes()
    given = step.step_embeds(torch.bfloat16, torch.device("cpu"))
    assert given is not None and torch.equal(given.tokens, embeds.tokens)
    assert torch.equal(given.vectors, embeds.vectors)
    assert logits.tokens == np.array([5, 6], np.int64).tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("rank", [0, 1])
def test_graph_that_one_rank_cannot_capture_is_dropped_by_all(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one rank would replay a graph while another launches kernels or a larger graph, and the exchange would hang."""
    expected = made("llama", tmp_path)
    config, device = rank_config(tmp_path), devices_of(2)[rank]
    capture, captured = device.capture, 0

    def capture_the_first(run: Callable[[], None]) -> Callable[[], None]:
        nonlocal captured
        captured += 1
        if captured > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return capture(run)

    with (
        mock.patch.object(device, "capture", capture_the_first),
        caplog.at_level(logging.WARNING, "quintet"),
        leading_worker(config) as worker,
    ):
        driver = CoreAndWorker(config, worker)
        for i, each in enumerate(expected):
            driver.admit(i, each.prompt, GREEDY)
        driver.run()
        graphs = worker.steps.graphs
        assert graphs is not None and [size for size in (1, 2, 4) if graphs.of_size(GraphSize(size, 1))] == [
            4
        ]
        with pytest.raises(
            RankDesyncError, match="a graph of 2 tokens, up to 1 a row; this rank has no such graph"
        ):
            worker.steps.graph_of_size(GraphSize(2, 1), worker.steps.staging)
    assert [driver.outputs[i] for i in range(len(expected))] == [each.outputs for each in expected]
    reasons = [
        record.getMessage()
        for record in caplog.records
        if "steps of 1, 2 tokens run eagerly" in record.getMessage()
    ]
    assert len(reasons) == 2
    assert {"another rank" in reason for reason in reasons} == {True, False}


def test_wait_limit_starts_after_every_rank_has_loaded_its_kernels(tmp_path: Path) -> None:
    """Compiling takes minutes, perhaps at one rank only: at boot a rank waits without a limit."""
    expected = made("llama", tmp_path)
    config = rank_config(tmp_path)
    launches: list[tuple[int, Kernel, int | None]] = []

    def watched(rank: int, launch: Callable[..., None]) -> Callable[..., None]:
        def watch(kernel: Kernel, grid: Size, block: Size, args: Sequence[Any], **more: int) -> None:
            timeout_ns = args[len(EXCHANGE) - 1] if kernel.kinds.startswith(EXCHANGE) else None
            launches.append((rank, kernel, timeout_ns))
            launch(kernel, grid, block, args, **more)

        return watch

    def of_waits() -> set[int]:
        return {timeout_ns for _, _, timeout_ns in launches if timeout_ns is not None}

    with ExitStack() as stack:
        for rank, device in enumerate(devices_of(2)):
            stack.enter_context(mock.patch.object(device, "launch", watched(rank, device.launch)))
        worker = stack.enter_context(leading_worker(config, captured=False))
        loaded = {(rank, kernel.module) for rank, kernel, _ in launches}
        assert of_waits() == {NO_TIMEOUT_NS}
        launches.clear()
        driver = CoreAndWorker(config, worker)
        for i, each in enumerate(expected):
            driver.admit(i, each.prompt, GREEDY)
        driver.run()
    assert of_waits() == {int(WAIT_TIMEOUT_S * 1e9)}
    assert {(rank, kernel.module) for rank, kernel, _ in launches} <= loaded


def test_boot_waits_for_a_compiling_rank(tmp_path: Path) -> None:
    write_checkpoint(KINDS["llama"], tmp_path)
    config, devices = rank_config(tmp_path), devices_of(2)
    compiled, waited = threading.Event(), threading.Event()

    def run_rank(rank: int, descriptor: int) -> torch.Tensor:
        ranks = open_device_ranks(config, descriptor, rank)
        communicator = communicator_of(devices[rank], ranks, config)
        if rank == 1:
            assert not compiled.wait(0.2), "no message is sent: compile time passes"
        total = communicator.add(torch.ones(1, 8))
        communicator.peers.check()
        communicator.peers.limit_waits()
        if rank == 0:
            communicator.add(torch.ones(1, 8))
            waited.set()
            with pytest.raises(RankDesyncError, match=r"rank 0 of 2 timed out after 0\.05 s"):
                communicator.peers.check()
        assert waited.wait(60.0)
        return total

    with (
        (tmp_path / "memory").open("w+b") as memory,
        mock.patch.object(Peers, "limit_waits", partialmethod(Peers.limit_waits, 0.05)),
    ):
        works = [partial(run_rank, rank, memory.fileno()) for rank in range(2)]
        for total in run_concurrently(works):
            assert torch.equal(total, torch.full((1, 8), 2.0))


def test_step_failure_after_the_broadcast_ends_the_group(tmp_path: Path) -> None:
    """The other ranks received the whole step and wait for the rest: a split step or the next one would not match."""
    made("llama", tmp_path)
    config = rank_config(tmp_path)
    with leading_worker(config, captured=False) as worker:
        launch = worker.runner.compute

        def compute(*sizes: Any) -> Any:
            launch(*sizes)
            raise torch.OutOfMemoryError("CUDA out of memory.")

        worker.runner.compute = compute  # type: ignore[method-assign]
        driver = CoreAndWorker(config, worker)
        driver.admit(0, [1, 2, 3], GREEDY)
        with pytest.raises(RankDesyncError, match="rank 0 did not complete the launches") as error:
            driver.run()
        assert worker.is_broken(error.value)
        worker.runner.compute = launch  # type: ignore[method-assign]


def test_step_failure_before_the_broadcast_ends_the_group(tmp_path: Path) -> None:
    """Rank 0 has already moved the step's blocks; parts of the step would not make the others move theirs."""
    made("llama", tmp_path)
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    config = rank_config(tmp_path)
    shortage = torch.OutOfMemoryError("CUDA out of memory.")
    with leading_worker(config, captured=False) as worker:
        driver = CoreAndWorker(config, worker)
        driver.admit(0, mixed(table, [[1, 2, 3]])[0], GREEDY)
        with (
            mock.patch("quintet.executor.backends.cuda.worker.embeds_of", side_effect=shortage),
            pytest.raises(RankDesyncError, match="rank 0 did not complete the launches"),
        ):
            driver.run()


def test_library_sums_large_messages_unless_batch_invariant() -> None:
    """The fake library adds in place, as NCCL does; with and without a bias."""
    rows, width = ONE_SHOT_BYTES[2] // (64 * 4) + 1, 64
    barrier, added = threading.Barrier(2), [torch.empty(0)] * 2

    class Library:
        def __init__(self, rank: int) -> None:
            self.rank, self.calls = rank, 0

        def __call__(self, x: torch.Tensor) -> None:
            self.calls += 1
            added[self.rank] = x.clone()
            barrier.wait()
            x.copy_(added[0] + added[1])
            barrier.wait()

    devices, bias = devices_of(2), torch.full((width,), 0.5)

    def work(peers: Peers, library: Library | None) -> list[torch.Tensor]:
        communicator = DeviceCommunicator(devices[peers.rank], Share(peers.rank, 2), peers, library)
        parts = [torch.full((count, width), float(peers.rank + 1)) for count in (1, rows)]
        return [communicator.add(part, bias) for part in parts]

    libraries = [Library(rank) for rank in range(2)]
    for each in (libraries, [None, None]):
        works = [partial(work, *pair) for pair in zip(peers_of(devices), each, strict=True)]
        for sums in run_concurrently(works):
            assert [bool((total == 3.5).all()) for total in sums] == [True, True]
    assert [library.calls for library in libraries] == [1, 1]
