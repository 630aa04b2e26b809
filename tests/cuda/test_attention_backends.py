"""Choice of the attention backend for prompts: candidates, rejected backends, and the reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.cuda.kernels.attention_problem import FP8
from tests.cuda.rank_choices import chosen_by

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, UnsupportedError
from quintet.executor.backends.cuda.attention.choice import (
    BACKENDS,
    BackendChoice,
    choose_attention,
    choose_for_ranks,
    probe_rows,
    random_step,
)
from quintet.executor.backends.cuda.attention.flashinfer import FlashInferAttention
from quintet.executor.backends.cuda.attention.torch_varlen import TorchAttention
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import AttentionPlan, paged_attention
from quintet.executor.backends.platforms.platform import import_string
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.attention import AttentionWindow
from quintet.wire.errors import ConfigError

OURS = BACKENDS["quintet"]
NEEDS = AttentionNeeds(torch.bfloat16, torch.bfloat16, 4, 2, 64, 16, 0.125, 300)


def make_plan(device: Device, needs: AttentionNeeds) -> AttentionPlan:
    return AttentionPlan(
        device, 8, 160, needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.max_model_len,
        needs.dtype, needs.kv_dtype, fixed_splits=needs.batch_invariant,
        attention_windows=tuple(map(AttentionWindow, needs.windows)),
    )  # fmt: skip


def choose(
    device: Device,
    wanted: str,
    times_ms: dict[str, float] | None = None,
    needs: AttentionNeeds = NEEDS,
    **fakes: str,
) -> BackendChoice:
    """Choose among fakes; ``times_ms`` are the durations of the timed backends, in order."""
    times = iter((times_ms or {}).values())

    def stopwatch(run: Callable[[], None]) -> float:
        return next(times)

    backends = {"quintet": OURS} | {name: f"tests.cuda.fake_attention:{fake}" for name, fake in fakes.items()}
    return choose_attention(wanted, device, make_plan(device, needs), needs, stopwatch, backends)


def test_faster_library_is_used(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quintet"):
        choice = choose(
            device,
            "auto",
            {"flashinfer": 1.0, "torch": 0.8, "ours": 2.0},
            flashinfer="Correct",
            torch="Correct",
        )
    assert choice.name == "torch"
    assert caplog.messages == [
        "attention of prompts: torch (measured: quintet 2.000 ms, flashinfer 1.000 ms, torch 0.800 ms)"
    ]


def test_own_kernels_are_used_unless_a_library_is_clearly_faster(device: Device) -> None:
    choice = choose(device, "auto", {"flashinfer": 0.97, "ours": 1.0}, flashinfer="Correct", torch="Raises")
    assert choice.name == "quintet"
    assert choice.reason == (
        "measured: quintet 1.000 ms, flashinfer 0.970 ms; torch failed: RuntimeError: no kernel image is available"
    )


@pytest.mark.parametrize("wrong", ["WindowOffByOne", "SeesNextToken", "ReadsMaskedPositions"])
def test_library_with_wrong_results_is_not_used(device: Device, wrong: str) -> None:
    needs = replace(NEEDS, windows=(None, 200))
    choice = choose(device, "mine", needs=needs, mine=wrong)
    assert choice.name == "quintet"
    assert "differs from our kernels by up to" in choice.reason


def test_requested_library_is_used_if_its_results_agree(device: Device) -> None:
    assert choose(device, "mine", mine="Correct", needs=replace(NEEDS, windows=(None, 200))).name == "mine"
    choice = choose(device, "mine", mine="Declines")
    assert (choice.name, choice.reason) == ("quintet", "mine: heads of 64, it takes 1000")


def test_missing_library_is_not_used(device: Device) -> None:
    choice = choose_attention(
        "mine",
        device,
        make_plan(device, NEEDS),
        NEEDS,
        lambda run: 1.0,
        {"quintet": OURS, "mine": "nowhere_at_all:X"},
    )
    assert choice.name == "quintet"
    assert choice.reason.startswith("mine is not installed: No module named")


def test_batch_invariant_uses_own_kernels(device: Device) -> None:
    choice = choose(device, "mine", needs=replace(NEEDS, batch_invariant=True), mine="Correct")
    assert choice.name == "quintet"
    assert "--batch-invariant" in choice.reason
    assert choose(device, "quintet").reason == "set by --attention-backend"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({1: "Correct", 2: "Correct"}, "torch"),
        ({1: "Correct", 2: "Raises"}, "quintet"),
    ],
    ids=["every_rank has it", "one cannot"],
)
def test_rank_0_chooses_for_all(device: Device, own: dict[int, str], expected: str) -> None:
    """Rank 0's times decide for all ranks; a backend missing on one rank is not used on any."""

    def choose_at(ranks: Ranks) -> str:
        rank = ranks.share.rank
        times = {"flashinfer": 1.0, "torch": 0.8, "ours": 2.0 if rank == 0 else 0.1}
        fake = own.get(rank, "Correct")
        return choose_for_ranks(
            "auto", ranks, lambda name: choose(device, name, times, flashinfer="Correct", torch=fake)
        ).name

    assert chosen_by(3, choose_at) == [expected] * 3


def test_unknown_backend_name_is_a_user_error(device: Device) -> None:
    with pytest.raises(ConfigError, match="--attention-backend is 'speedy'; allowed are auto, quintet"):
        choose(device, "speedy")


def test_every_backend_of_the_registry_can_be_imported() -> None:
    for path in BACKENDS.values():
        assert callable(import_string(path))


@pytest.mark.parametrize(
    ("backend", "changed", "reason"),
    [
        (TorchAttention, {"kv_dtype": FP8}, "KV cache is torch.float8_e4m3fn"),
        (TorchAttention, {"soft_cap": 30.0}, "softcap"),
        (TorchAttention, {"head_dim": 288}, "head_dim is 288"),
        (FlashInferAttention, {"head_dim": 96}, "head_dim is 96"),
        (FlashInferAttention, {"alibi": torch.ones(4)}, "ALiBi"),
    ],
)
def test_libraries_give_the_reason_of_a_rejection(
    device: Device,
    backend: type[TorchAttention | FlashInferAttention],
    changed: dict[str, object],
    reason: str,
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        backend(device, make_plan(device, NEEDS), replace(NEEDS, **changed))  # type: ignore[arg-type]


def test_flashinfer_receives_the_documented_arguments(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments as documented, by a stub that computes from them with our kernels' reference."""
    planned: list[tuple[object, ...]] = []

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert layout == "HND"

        def plan(self, *columns: torch.Tensor, **options: object) -> None:
            planned.append((*columns, options))

    monkeypatch.setitem(
        __import__("sys").modules,
        "flashinfer",
        type("flashinfer", (), {"BatchPrefillWithPagedKVCacheWrapper": Wrapper}),
    )
    needs = replace(NEEDS, windows=(None, 100))
    plan = make_plan(device, needs)
    step = random_step(device, plan, needs, probe_rows(needs))
    FlashInferAttention(device, plan, needs).prepare(step.rows, step.host)

    assert [entry[-1]["window_left"] for entry in planned] == [-1, 99]  # type: ignore[index]
    tokens, blocks, indices, last = planned[0][:4]
    assert isinstance(tokens, torch.Tensor)
    assert isinstance(blocks, torch.Tensor)
    assert isinstance(indices, torch.Tensor)
    assert isinstance(last, torch.Tensor)
    lengths = (step.host.starts + step.host.counts).tolist()
    assert tokens.tolist() == step.rows.offsets.tolist()
    assert np.diff(blocks.numpy()).tolist() == [-(-length // 16) for length in lengths]
    for row, length in enumerate(lengths):
        mine = indices[blocks[row] : blocks[row + 1]].tolist()
        assert mine == step.rows.block_table[row, : len(mine)].tolist()
        assert (len(mine) - 1) * 16 + int(last[row]) == length


def test_probe_equals_own_kernels(device: Device) -> None:
    needs = replace(NEEDS, windows=(None, 100))
    plan = make_plan(device, needs)
    step = random_step(device, plan, needs, probe_rows(needs))
    plan.prepare(step.rows)
    out = paged_attention(device, plan, step.q, step.kv, step.rows, needs.scale, 100)
    assert not out.isnan().any()
