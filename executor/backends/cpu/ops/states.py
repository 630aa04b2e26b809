"""Operations with a recurrent state, as torch references: causal convolution, scans of Mamba 1 and 2, gated delta rule.

- `causal_conv`: depthwise causal convolution; its state is the last inputs of a row.
- `selective_scan`: scan of Mamba. Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023),
  section 3.2.
- `head_scan`: scan of Mamba 2. Dao and Gu, "Transformers are SSMs" (2024), equation 1 with scalar-identity A.
- `delta_rule`: Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024), equation 10.

Scans are computed token by token: sums by chunks would depend on the division of a request into steps.

A layer's states are one tensor per kind, ``[num_blocks, ...]``, indexed by blocks of the state group. A row reads one block and
writes one, the same or another. Operations process one token of all rows at a time. With one token per row there is no loop
and no host read of an index, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows of consecutive tokens of a step, on one device."""

    sources: torch.Tensor
    """int64[R]: block to load the state from."""
    targets: torch.Tensor
    """int64[R]: block to save the state after the row's last token; distinct for all rows."""
    fresh: torch.Tensor
    """bool[R]: whether the row starts a request, with a zero state regardless of the source block."""
    offsets: torch.Tensor
    """int64[R]: index of the row's first token in the step."""
    counts: torch.Tensor
    """int64[R]: number of tokens of the row."""
    max_count: int
    """Largest of the counts."""

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """Return a copy of each row's state ``[R, ...]``."""
        fresh = self.fresh.view(-1, *(1 for _ in states.shape[1:]))
        return states[self.sources].masked_fill_(fresh, 0)

    def save(self, states: torch.Tensor, after: torch.Tensor) -> None:
        """Write each row's state ``after [R, ...]``."""
        states[self.targets] = after

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each token position within the rows, the token indices ``int64[R]`` and the active rows ``bool[R]``."""
        for i in range(self.max_count):
            active = self.counts > i
            yield torch.where(active, self.offsets + i, 0), active


class Scanned:
    """Result of a scan, filled token by token; shaped like one of its inputs."""

    def __init__(self, like: torch.Tensor) -> None:
        # Inactive rows write to the extra last line, which is dropped.
        self._lines = like.new_zeros((len(like) + 1, like.shape[1]))

    def put(self, tokens: torch.Tensor, active: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values [R, ...]`` of the active rows to the lines of ``tokens [R]``, cast to the lines' dtype."""
        lines = torch.where(active, tokens, len(self._lines) - 1)
        self._lines[lines] = values.reshape(len(values), -1).to(self._lines.dtype)

    @property
    def lines(self) -> torch.Tensor:
        """``[num_tokens, width]``."""
        return self._lines[:-1]


def keep_where(active: torch.Tensor, after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the states ``after [R, ...]`` of active rows and ``before`` of the others."""
    return torch.where(active.view(-1, *(1 for _ in after.shape[1:])), after, before)


def causal_conv(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Return ``bias + sum over j of weight[j] * x[t - (taps - 1) + j]``, rounded, with SiLU applied if ``silu``.

    x: ``[T, channels]``; weight: float32 ``[taps, channels]``, newest input last; states: ``[num_blocks, taps - 1, channels]``
    in the dtype of x, overwritten.
    """
    old = len(weight) - 1
    before = rows.load(states)  # [R, old, channels]
    # Line i of `inputs` is token i of the step; the states of all rows follow the tokens.
    inputs = torch.cat((x, before.reshape(-1, x.shape[1])))

    def lines(row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the line of input ``index`` of a row; a negative index reads the state, -1 is the newest."""
        return torch.where(index >= 0, rows.offsets[row] + index, len(x) + (row + 1) * old + index)

    tokens = torch.arange(len(x), device=x.device)
    owners = torch.searchsorted(rows.offsets + rows.counts, tokens, right=True).clamp_(
        max=len(rows.counts) - 1
    )
    within = tokens - rows.offsets[owners]
    total = x.new_zeros(x.shape, dtype=torch.float32) if bias is None else bias.expand(x.shape).clone()
    for j, factor in enumerate(weight):
        total += factor * inputs[lines(owners, within - (old - j)).clamp_(0, len(inputs) - 1)]
    newest = rows.counts[:, None] + torch.arange(-old, 0, device=x.device)  # [R, old]
    numbers = torch.arange(len(rows.counts), device=x.device)[:, None]
    rows.save(states, inputs[lines(numbers, newest)])
    y = total.to(x.dtype)
    return F.silu(y.float()).to(x.dtype) if silu else y


def selective_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
) -> torch.Tensor:
    """Return ``(state · c + skip * x) * silu(gate)`` where ``state = exp(d a) state + d x b``, ``d = softplus(dt + dt_bias)``.

    x, dt, gate: ``[T, channels]``; b, c: ``[T, state_size]``; a: ``[state_size, channels]``; dt_bias, skip: ``[channels]``;
    states: ``[num_blocks, state_size, channels]``, overwritten. Parameters, states and arithmetic: float32.
    """
    state = rows.load(states)
    scanned = Scanned(x)
    for tokens, active in rows.steps():
        inputs = x[tokens].float()  # [R, channels]
        width = F.softplus(dt[tokens].float() + dt_bias)
        added = (width * inputs)[:, None] * b[tokens].float()[:, :, None]
        state = keep_where(active, state * torch.exp(width[:, None] * a) + added, state)
        y = (state * c[tokens].float()[:, :, None]).sum(1) + skip * inputs
        scanned.put(tokens, active, y * F.silu(gate[tokens].float()))
    rows.save(states, state)
    return scanned.lines


def head_scan(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    dt_limits: tuple[float, float],
) -> torch.Tensor:
    """Return ``(c · state + skip * x) * silu(gate)`` where ``state = exp(d a) state + b (d x)``, ``d = softplus(dt + dt_bias)``.

    x, gate: ``[T, heads * head_dim]``; dt: ``[T, heads]``; b, c: ``[T, groups * state_size]``, each group shared by
    ``heads / groups`` heads; a, dt_bias, skip: ``[heads]``; dt_limits: bounds of d; states: ``[num_blocks, heads, state_size,
    head_dim]``, overwritten. Parameters, states and arithmetic: float32.
    """
    _, heads, state_size, head_dim = states.shape
    shared_by = heads * state_size // b.shape[1]
    state = rows.load(states)
    scanned = Scanned(x)

    def of_heads(groups: torch.Tensor) -> torch.Tensor:
        return groups.float().view(len(groups), -1, state_size).repeat_interleave(shared_by, 1)[..., None]

    for tokens, active in rows.steps():
        inputs = x[tokens].float().view(-1, heads, head_dim)
        width = F.softplus(dt[tokens].float() + dt_bias).clamp(*dt_limits)[..., None]  # [R, heads, 1]
        decayed = state * torch.exp(width * a[:, None])[..., None]
        state = keep_where(active, decayed + of_heads(b[tokens]) * (width * inputs)[:, :, None], state)
        y = (state * of_heads(c[tokens])).sum(2) + skip[:, None] * inputs
        if gate is not None:
            y = y * F.silu(gate[tokens].float()).view(-1, heads, head_dim)
        scanned.put(tokens, active, y)
    rows.save(states, state)
    return scanned.lines


def delta_rule(
    rows: StateRows,
    states: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
) -> torch.Tensor:
    """Return ``state · q / sqrt(key_dim)`` after ``state = decay state + k (v - (decay state) · k) sigmoid(beta)``.

    ``decay = exp(a softplus(alpha + dt_bias))``; q and k are normalised to unit length. q, k: ``[T, key_heads * key_dim]``, each
    head shared by ``heads / key_heads`` value heads; v: ``[T, heads * head_dim]``; alpha, beta: ``[T, heads]``; a, dt_bias:
    ``[heads]``; states: ``[num_blocks, heads, key_dim, head_dim]``, overwritten. Parameters, states and arithmetic: float32.
    """
    _, heads, key_dim, head_dim = states.shape
    shared_by = heads * key_dim // k.shape[1]
    state = rows.load(states)
    scanned = Scanned(v)

    def unit_length(vectors: torch.Tensor) -> torch.Tensor:
        heads_of_keys = vectors.float().view(len(vectors), -1, key_dim)
        length = torch.rsqrt(heads_of_keys.square().sum(-1, keepdim=True) + 1e-6)
        return (heads_of_keys * length).repeat_interleave(shared_by, 1)[..., None]  # [R, heads, key_dim, 1]

    for tokens, active in rows.steps():
        decay = torch.exp(a * F.softplus(alpha[tokens].float() + dt_bias))
        key, decayed = unit_length(k[tokens]), state * decay[..., None, None]
        values = v[tokens].float().view(-1, heads, head_dim)
        delta = (values - (decayed * key).sum(2)) * torch.sigmoid(beta[tokens].float())[..., None]
        state = keep_where(active, decayed + key * delta[:, :, None], state)
        scanned.put(tokens, active, (state * unit_length(q[tokens])).sum(2) * key_dim**-0.5)
    rows.save(states, state)
    return scanned.lines
