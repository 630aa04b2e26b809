"""Operations with a recurrent state, as torch references: causal convolution, scans of Mamba 1 and 2, gated delta rule.

- `causal_conv`: depthwise causal convolution; its state is the last inputs of a row.
- `selective_scan`: scan of Mamba. Gu and Dao, "Mamba: linear-time sequence modeling with selective state spaces" (2023),
  section 3.2.
- `head_scan`: scan of Mamba 2. Dao and Gu, "Transformers are SSMs" (2024), equation 1 with scalar-identity A.
- `delta_rule`: Yang, Kautz and Hatamizadeh, "Gated delta networks" (2024), equation 10.

Scans are computed token by token: sums by chunks would depend on the division of a request into steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.state_rows import Scanned, StateRows, keep_where


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
