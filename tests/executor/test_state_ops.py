"""Reference operations with a recurrent state against transformers on the whole sequence.

Tolerance: fp32, sums of some hundreds of terms in another order (transformers computes blocks of tokens).
"""

from __future__ import annotations

import pytest
import torch
from tests.executor.kernels.state_problems import Problem, conv, delta, heads, rows_of, selective
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from quintet.executor.backends.cpu.ops.states import causal_conv, delta_rule, head_scan, selective_scan

NUM_TOKENS = 41


def in_chunks(problem: Problem, operation: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tokens in three steps, with another request in the batch; return the results and the final state."""
    module = type("Module", (), {problem.name: staticmethod(operation)})
    states = problem.states(4)
    other = states[3].clone()
    pieces = []
    for begin, end in ((0, 1), (1, 30), (30, NUM_TOKENS)):
        rows = rows_of([end - begin], [2], [2], [begin == 0])
        pieces.append(problem.run(module, rows, states, slice(begin, end)))  # type: ignore[arg-type]
    torch.testing.assert_close(states[3], other, equal_nan=True)
    return torch.cat(pieces), states[2]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution(bias: bool, silu: bool) -> None:
    problem = conv(NUM_TOKENS, torch.float32, 24, 4, bias, silu)
    y, state = in_chunks(problem, causal_conv)
    x, arguments = problem.values[0], problem.arguments
    weight, own_bias = arguments["weight"], arguments["bias"]
    assert isinstance(weight, torch.Tensor)
    theirs = causal_conv1d_fn(x.T[None], weight.T, own_bias, activation="silu" if silu else None)
    close(y, theirs[0].T)
    assert torch.equal(state, x[-3:])


def test_selective_scan() -> None:
    problem = selective(NUM_TOKENS, torch.float32, 24, 16)
    y, state = in_chunks(problem, selective_scan)
    x, dt, b, c, gate = (value.T[None] for value in problem.values)
    a, dt_bias, skip = (problem.arguments[name] for name in ("a", "dt_bias", "skip"))
    assert isinstance(a, torch.Tensor)
    theirs, their_state = mamba_selective_scan(
        *(x, dt, a.T, b, c, skip, gate, dt_bias), delta_softplus=True, return_last_state=True
    )
    close(y, theirs[0].T)
    close(state, their_state[0].T)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 0.8)])
@pytest.mark.parametrize("groups", [1, 2])
def test_head_scan(groups: int, limits: tuple[float, float]) -> None:
    num_heads, head_dim, size = 4, 8, 16
    problem = heads(NUM_TOKENS, torch.float32, num_heads, head_dim, groups, size, gated=False, limits=limits)
    y, state = in_chunks(problem, head_scan)
    x, dt, b, c = (value[None] for value in problem.values)
    theirs, their_state = mamba2_chunk_scan(
        x.reshape(1, NUM_TOKENS, num_heads, head_dim),
        dt,
        problem.arguments["a"],
        b.reshape(1, NUM_TOKENS, groups, size),
        c.reshape(1, NUM_TOKENS, groups, size),
        chunk_size=16,
        D=problem.arguments["skip"],
        dt_bias=problem.arguments["dt_bias"],
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    close(y, theirs.reshape(NUM_TOKENS, -1))
    close(state, their_state[0].transpose(1, 2))


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_delta_rule(theirs: object) -> None:
    num_heads, head_dim, key_heads, key_dim = 4, 8, 2, 16
    problem = delta(NUM_TOKENS, torch.float32, num_heads, head_dim, key_heads, key_dim)
    y, state = in_chunks(problem, delta_rule)
    q, k, v, alpha, beta = (value[None] for value in problem.values)
    decay = problem.arguments["a"] * torch.nn.functional.softplus(alpha + problem.arguments["dt_bias"])  # type: ignore[operator]
    expected, their_state = theirs(  # type: ignore[operator]
        q.reshape(1, NUM_TOKENS, key_heads, key_dim),
        k.reshape(1, NUM_TOKENS, key_heads, key_dim),
        v.reshape(1, NUM_TOKENS, num_heads, head_dim),
        g=decay,
        beta=beta.sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(y, expected.reshape(NUM_TOKENS, -1))
    close(state, their_state[0])
