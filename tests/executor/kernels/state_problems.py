"""Random inputs for each operation with a recurrent state: operation, states, and split of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch

from quintet.executor.backends.cpu.ops.states import StateRows

Operation = Callable[[StateRows, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(slots=True)
class Problem:
    """Inputs of an operation for some tokens; its parameters are bound."""

    name: str
    values: list[torch.Tensor]
    """``[T, width]`` each."""
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype
    arguments: dict[str, object] = field(default_factory=dict)

    def run(
        self, module: ModuleType, rows: StateRows, states: torch.Tensor, tokens: slice = slice(None)
    ) -> torch.Tensor:
        """Call ``module``'s operation of that name for some of the tokens."""
        result: torch.Tensor = getattr(module, self.name)(
            rows, states, *(value[tokens] for value in self.values), **self.arguments
        )
        return result

    def states(self, num_blocks: int) -> torch.Tensor:
        """Return blocks full of NaN, as left by an earlier request."""
        return torch.full((num_blocks, *self.state_shape), torch.nan, dtype=self.state_dtype)


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def columns(num_tokens: int, dtype: torch.dtype, *widths: int, seed: int = 0) -> list[torch.Tensor]:
    """Return adjacent columns of wider rows, like the outputs of a fused projection."""
    whole = noise(num_tokens, sum(widths) + 5, seed=seed).to(dtype)
    return list(whole[:, : sum(widths)].split(widths, 1))


def conv(
    num_tokens: int, dtype: torch.dtype, channels: int, taps: int, bias: bool = True, silu: bool = True
) -> Problem:
    arguments: dict[str, object] = {
        "weight": noise(taps, channels, seed=1),
        "bias": noise(channels, seed=2) if bias else None,
        "silu": silu,
    }
    return Problem(
        "causal_conv", columns(num_tokens, dtype, channels), (taps - 1, channels), dtype, arguments
    )


def _fading(*shape: int, seed: int) -> torch.Tensor:
    return -torch.exp(noise(*shape, seed=seed))


def selective(num_tokens: int, dtype: torch.dtype, channels: int, size: int) -> Problem:
    arguments: dict[str, object] = {
        "a": _fading(size, channels, seed=3),
        "dt_bias": noise(channels, seed=4),
        "skip": noise(channels, seed=5),
    }
    values = columns(num_tokens, dtype, channels, channels, size, size, channels)
    return Problem("selective_scan", values, (size, channels), torch.float32, arguments)


def heads(
    num_tokens: int,
    dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    groups: int,
    size: int,
    gated: bool = True,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Problem:
    arguments: dict[str, object] = {
        "a": _fading(num_heads, seed=3),
        "dt_bias": noise(num_heads, seed=4),
        "skip": noise(num_heads, seed=5),
        "dt_limits": limits,
    }
    width = num_heads * head_dim
    values = columns(num_tokens, dtype, width, num_heads, groups * size, groups * size, width)
    if not gated:
        values.pop()
        arguments["gate"] = None
    return Problem("head_scan", values, (num_heads, size, head_dim), torch.float32, arguments)


def delta(
    num_tokens: int, dtype: torch.dtype, num_heads: int, head_dim: int, key_heads: int, key_dim: int
) -> Problem:
    arguments: dict[str, object] = {"a": _fading(num_heads, seed=3), "dt_bias": noise(num_heads, seed=4)}
    keys = key_heads * key_dim
    values = columns(num_tokens, dtype, keys, keys, num_heads * head_dim, num_heads, num_heads)
    return Problem("delta_rule", values, (num_heads, key_dim, head_dim), torch.float32, arguments)


Maker = Callable[[int, torch.dtype], Problem]

SHAPES: dict[str, Maker] = {
    "conv of 4": partial(conv, channels=100, taps=4),
    "conv of 3, wide": partial(conv, channels=1050, taps=3, bias=False, silu=False),
    "conv of 2": partial(conv, channels=17, taps=2, silu=False),
    "mamba": partial(selective, channels=100, size=16),
    "mamba, odd": partial(selective, channels=33, size=5),
    "mamba 2": partial(heads, num_heads=4, head_dim=64, groups=2, size=128),
    "mamba 2, wide heads": partial(heads, num_heads=2, head_dim=100, groups=1, size=24, gated=False),
    "mamba 2, small heads": partial(heads, num_heads=6, head_dim=8, groups=3, size=256, limits=(0.05, 1.5)),
    "delta rule": partial(delta, num_heads=4, head_dim=128, key_heads=2, key_dim=128),
    "delta rule, odd": partial(delta, num_heads=3, head_dim=20, key_heads=3, key_dim=24),
}


def rows_of(
    counts: Sequence[int],
    sources: Sequence[int],
    targets: Sequence[int] | None = None,
    fresh: Sequence[bool] | None = None,
) -> StateRows:
    """Return consecutive rows with these token counts; without ``fresh`` all start from zero."""
    counted = torch.tensor(counts)
    return StateRows(
        sources=torch.tensor(sources),
        targets=torch.tensor(sources if targets is None else targets),
        fresh=torch.tensor([True] * len(counts) if fresh is None else fresh),
        offsets=torch.cumsum(counted, 0) - counted,
        counts=counted,
        max_count=max(counts),
    )
