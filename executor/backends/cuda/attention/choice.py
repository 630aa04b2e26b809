"""Selects the attention backend for steps with prompts at startup, and logs it with the reason.

A library is selected if it supports the model, agrees with our kernels on a probe, a small random step, and is faster on a
larger one.
After any error our kernels are used: a server must not fail because of an optional library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    HostRows,
    OpenBackend,
    UnsupportedError,
)
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import Stopwatch
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.backends.platforms.platform import entry_point_path, import_string
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.wire.errors import ConfigError

log = logging.getLogger("quintet")

OURS = "quintet"
BACKENDS = {
    OURS: "quintet.executor.backends.cuda.attention.backend:QuintetAttention",
    "flashinfer": "quintet.executor.backends.cuda.attention.flashinfer:FlashInferAttention",
    "torch": "quintet.executor.backends.cuda.attention.torch_varlen:TorchAttention",
}
"""Import path of the constructor per ``--attention-backend``. Third parties register entry points of ``quintet.attention``."""

CANDIDATES = ("flashinfer", "torch")
"""Libraries that ``auto`` tries."""

MARGIN = 0.95
"""A library is selected if it takes at most this fraction of our time; a smaller gain does not justify two code paths."""

TIMED_TOKENS = 4096
"""Length of the timed prompt, limited by the plan."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Selected backend, with the reason."""

    name: str
    backend: AttentionBackend
    reason: str


def choose_attention(
    requested: str,
    device: Device,
    plan: AttentionPlan,
    needs: AttentionNeeds,
    stopwatch: Stopwatch,
    backends: Mapping[str, str] = BACKENDS,
) -> BackendChoice:
    """Return the backend for ``--attention-backend requested``; `ConfigError` for an unregistered name."""
    ours: OpenBackend = import_string(backends[OURS])
    choice = _choose(requested, device, plan, needs, stopwatch, backends, ours(device, plan, needs))
    log.info("attention of prompts: %s (%s)", choice.name, choice.reason)
    return choice


def choose_for_ranks(requested: str, ranks: Ranks, choose: Callable[[str], BackendChoice]) -> BackendChoice:
    """Return rank 0's choice at every rank, or our kernels if some rank cannot use it. All ranks call it.

    The ranks must agree, because backends round differently, and measured times differ between ranks.
    """
    own = choose(requested) if ranks.share.rank == 0 else None
    name = ranks.broadcast_from_first(b"" if own is None else own.name.encode()).decode()
    choice = own or choose(name)
    if ranks.all_agree(choice.name == name):
        return choice
    log.warning("attention of prompts: %s is not available on every rank; using %s", name, OURS)
    return choose(OURS)


def _choose(
    requested: str,
    device: Device,
    plan: AttentionPlan,
    needs: AttentionNeeds,
    stopwatch: Stopwatch,
    backends: Mapping[str, str],
    ours: AttentionBackend,
) -> BackendChoice:
    if requested == OURS:
        return BackendChoice(OURS, ours, "set by --attention-backend")
    paths = {name: _path(name, backends) for name in (CANDIDATES if requested == "auto" else (requested,))}
    if needs.batch_invariant:
        return BackendChoice(OURS, ours, "--batch-invariant needs fixed splits, which only our kernels have")
    reasons = []
    times_ms: dict[str, float] = {}
    usable: dict[str, AttentionBackend] = {}
    for name, path in paths.items():
        try:
            open_backend: OpenBackend = import_string(path)
            backend = open_backend(device, plan, needs)
            compare(backend, ours, plan, random_step(device, plan, needs, probe_rows(needs)), needs)
            if requested == "auto":
                times_ms[name] = _time(backend, device, plan, needs, stopwatch)
        except UnsupportedError as error:
            reasons.append(f"{name}: {error}")
        except ImportError as error:
            reasons.append(f"{name} is not installed: {error}")
        except Exception as error:  # noqa: BLE001  # an optional library may fail in any way
            reasons.append(f"{name} failed: {type(error).__name__}: {_first_line(error)}")
        else:
            usable[name] = backend
    if not usable:
        return BackendChoice(OURS, ours, "; ".join(reasons))
    if requested != "auto":
        return BackendChoice(
            requested, usable[requested], "set by --attention-backend; a probe agrees with our kernels"
        )
    return _fastest(usable, times_ms, _time(ours, device, plan, needs, stopwatch), ours, reasons)


def _fastest(
    usable: Mapping[str, AttentionBackend],
    times_ms: Mapping[str, float],
    ours_ms: float,
    ours: AttentionBackend,
    reasons: list[str],
) -> BackendChoice:
    best = min(usable, key=lambda name: times_ms[name])
    shown = ", ".join(f"{name} {time_ms:.3f} ms" for name, time_ms in {OURS: ours_ms, **times_ms}.items())
    reason = "; ".join([f"measured: {shown}", *reasons])
    if times_ms[best] <= MARGIN * ours_ms:
        return BackendChoice(best, usable[best], reason)
    return BackendChoice(OURS, ours, reason)


def _time(
    backend: AttentionBackend,
    device: Device,
    plan: AttentionPlan,
    needs: AttentionNeeds,
    stopwatch: Stopwatch,
) -> float:
    """Return the milliseconds of one layer over one prompt."""
    num_tokens = min(TIMED_TOKENS, plan.max_tokens, needs.max_model_len)
    step = random_step(device, plan, needs, rows=((0, num_tokens),))
    plan.prepare(step.rows)
    backend.prepare(step.rows, step.host)
    return stopwatch(lambda: _attend(backend, step, needs))


def _attend(backend: AttentionBackend, step: ProbeStep, needs: AttentionNeeds) -> None:
    backend.attend(step.q, step.kv, step.rows, needs.windows[0])


def _path(name: str, backends: Mapping[str, str]) -> str:
    path = backends.get(name) or entry_point_path("quintet.attention", name)
    if path is None:
        raise ConfigError(
            f"--attention-backend is {name!r}; allowed are auto, {', '.join(backends)}, and names that installed packages"
            " register under the entry point 'quintet.attention'"
        )
    return path


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


ROWS = ((0, 77), (130, 1), (37, 40))
"""Cached and new tokens of a prompt, a decode row and a chunk."""

PADDING = 3


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """A random step and its tensors."""

    rows: StepRows
    host: HostRows
    q: torch.Tensor
    kv: torch.Tensor


def random_step(
    device: Device, plan: AttentionPlan, needs: AttentionNeeds, rows: tuple[tuple[int, int], ...]
) -> ProbeStep:
    """Return a step of these rows, limited by the plan and the model, with padding.

    Cache entries that no row may read are NaN, to detect a backend that multiplies them by 0.
    """
    size, limit = needs.block_size, needs.max_model_len
    kept = [(min(start, limit - 1), count) for start, count in rows[: plan.max_rows]]
    starts = np.array([start for start, _ in kept], np.int32)
    share = max(1, plan.max_tokens // len(kept))
    counts = np.array([min(count, limit - start, share) for start, count in kept], np.int32)
    lengths = starts + counts
    blocks = -(-lengths // size)
    num_tokens = int(counts.sum())
    padding = min(PADDING, plan.max_tokens - num_tokens)
    generator = np.random.default_rng(0)
    order = generator.permutation(int(blocks.sum()) + 1).astype(np.int32)
    table = np.zeros((len(kept), int(blocks.max()) + 1), np.int32)
    bounds = np.concatenate([[0], np.cumsum(blocks)])
    for row in range(len(kept)):
        table[row, : blocks[row]] = order[bounds[row] : bounds[row + 1]]

    def on_device(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device.torch_device)

    step = StepRows(
        num_rows=len(kept),
        num_tokens=num_tokens + padding,
        max_count=int(counts.max()),
        slots=on_device(np.arange(len(kept), dtype=np.int32)),
        starts=on_device(starts),
        counts=on_device(counts),
        offsets=on_device(np.concatenate([[0], np.cumsum(counts)])),
        token_ids=on_device(np.zeros(num_tokens + padding, np.int32)),
        positions=on_device(
            np.concatenate(
                [*(np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)), np.full(padding, -1)]
            )
        ),
        token_rows=on_device(np.concatenate([np.repeat(np.arange(len(kept)), counts), np.full(padding, -1)])),
        block_table=on_device(table),
        block_size=size,
    )
    shape = (len(order), 2, needs.num_kv_heads, size, needs.head_dim)
    torch_generator = torch.Generator(device.torch_device).manual_seed(0)
    kv = torch.randn(shape, generator=torch_generator, device=device.torch_device).transpose(0, 1)
    for row, length in enumerate(lengths.tolist()):
        if length % size:
            kv[:, int(table[row, length // size]), :, length % size :] = torch.nan
    kv[:, int(order[-1])] = torch.nan
    q = torch.randn(
        (num_tokens + padding, needs.num_heads, needs.head_dim),
        generator=torch_generator,
        device=device.torch_device,
    )
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for position in _borders(start, length, needs.windows):
            kv[0, int(table[row, position // size]), 0, position % size] = 2.0 * q[int(step.offsets[row]), 0]
    return ProbeStep(step, HostRows(starts, counts), q.to(needs.dtype), kv.to(needs.dtype).to(needs.kv_dtype))


def _borders(start: int, length: int, windows: tuple[int | None, ...]) -> list[int]:
    """Return the positions on both sides of the attention limits of a row's first new token.

    Their keys are made similar to its first query, so they get most of the weight: an off-by-one mask then changes the result.
    """
    edges = [start - window + side for window in windows if window is not None for side in (0, 1)]
    return [position for position in (start + 1, *edges) if 0 <= position < length]


def probe_rows(needs: AttentionNeeds) -> tuple[tuple[int, int], ...]:
    """Return the rows of the comparison: `ROWS`, and one row longer than each window."""
    return (*ROWS, *((window + 5, 2) for window in needs.windows if window is not None))


def compare(
    backend: AttentionBackend,
    ours: AttentionBackend,
    plan: AttentionPlan,
    step: ProbeStep,
    needs: AttentionNeeds,
) -> None:
    """Raise `UnsupportedError` unless both backends agree up to rounding, for every window of the model.

    Each rounds weights and outputs to the model's dtype, by half a unit in the last place; values of the probe are at most about
    4. Three times that is far below the error of a wrong mask, scale or head order, which is about 1.
    """
    bound = 4.0 * 3.0 * torch.finfo(needs.dtype).eps
    plan.prepare(step.rows)
    backend.prepare(step.rows, step.host)
    for window in needs.windows:
        expected, actual = (one.attend(step.q, step.kv, step.rows, window) for one in (ours, backend))
        error = float((actual.float() - expected.float()).abs().max())
        if not error <= bound:  # also rejects NaN
            raise UnsupportedError(
                f"differs from our kernels by up to {error:.3g} on a random problem (window {window}); the limit is {bound:.3g}"
            )
