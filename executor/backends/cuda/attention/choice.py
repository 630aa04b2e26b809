"""Selects the attention backend for steps with prompts at startup, and logs it with the reason.

A library is selected if it supports the model, agrees with our kernels on a small random problem, and is faster on a larger one.
After any error our kernels are used: a server must not fail because of an optional library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quintet.executor.backends.cuda.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    OpenBackend,
    UnsupportedError,
)
from quintet.executor.backends.cuda.attention.probe import ProbeStep, compare, probe_rows, random_step
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
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

Stopwatch = Callable[[Callable[[], None]], float]
"""Runs a function's launches and returns the device time in milliseconds."""


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
