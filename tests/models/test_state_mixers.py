"""State mixers alone: against transformers' own modules, and the same bits in any chunks.

Plans are made by hand: two adjacent requests of each step move from block to block of a state group. Tolerance: fp32, sums
of up to some hundred terms in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from quintet.executor.backends.cpu.program.graph_builder import GraphBuilder
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.backends.cpu.program.values import Extent, Value
from quintet.executor.backends.torch.eager import EagerPass
from quintet.executor.batch import Batch, state_rows
from quintet.executor.checkpoints.quant.registry import open_quantization
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.spec import NormKind, NormSpec, StateSpec
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from quintet.executor.models.model import Setting
from quintet.executor.models.sublayers.layer import Sublayer, mixer
from quintet.executor.models.sublayers.scope import Scope
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.codec import pack_i32
from quintet.wire.kv_spec import KvSpec, LayerKv, group_layers
from quintet.wire.step import StepPlan

HIDDEN, NUM_TOKENS, NUM_BLOCKS, LAYER = 64, 37, 6, 2
CPU = torch.device("cpu")
RMS = NormSpec(kind=NormKind.RMS, eps=1e-5)
BARE = NormSpec(kind=NormKind.RMS, eps=1e-6, weighted=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A module of transformers and the equivalent spec."""

    module: Callable[[], torch.nn.Module]
    spec: StateSpec


def _of(kind: Any, config: Any, **settings: Any) -> Callable[[], torch.nn.Module]:
    """Drop transformers' initial values: FalconMamba sets those of norms that it has not created yet."""
    bare = {"initialize_mixer_weights": False} if kind is FalconMambaMixer else {}
    return lambda: kind(config(hidden_size=HIDDEN, num_hidden_layers=1, **settings), layer_idx=0, **bare)


def _mamba(inner_norm: NormSpec | None = None, **switches: Any) -> MambaSpec:
    usual: dict[str, Any] = {
        "channels": 128,
        "state_size": 16,
        "dt_rank": 4,
        "taps": 4,
        "conv_bias": True,
        "projection_bias": False,
    }
    return MambaSpec(**(usual | switches), inner_norm=inner_norm)


def _mamba2(norm: NormSpec | None = RMS, **switches: Any) -> Mamba2Spec:
    usual: dict[str, Any] = {
        "num_heads": 8,
        "head_dim": 16,
        "groups": 2,
        "state_size": 24,
        "taps": 4,
        "conv_bias": True,
        "projection_bias": False,
        "output_bias": False,
    }
    return Mamba2Spec(**(usual | switches), norm=norm)


_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}

CASES = {
    "mamba": Case(_of(MambaMixer, transformers.MambaConfig), _mamba()),
    "mamba, biases": Case(
        _of(MambaMixer, transformers.MambaConfig, use_bias=True, use_conv_bias=False, conv_kernel=3),
        _mamba(projection_bias=True, conv_bias=False, taps=3),
    ),
    "falcon mamba": Case(_of(FalconMambaMixer, transformers.FalconMambaConfig), _mamba(BARE)),
    "jamba": Case(_of(JambaMambaMixer, transformers.JambaConfig, rms_norm_eps=1e-5), _mamba(RMS)),
    "mamba2": Case(
        _of(
            *(Mamba2Mixer, transformers.Mamba2Config),
            num_heads=8,
            head_dim=16,
            n_groups=2,
            state_size=24,
            use_bias=True,
        ),
        _mamba2(projection_bias=True, output_bias=True),
    ),
    "mamba2, limits": Case(
        _of(BambaMixer, transformers.BambaConfig, **_HYBRID, time_step_limit=(0.1, 0.9)),
        _mamba2(dt_limits=(0.1, 0.9)),
    ),
    "falcon h1": Case(
        _of(
            *(FalconH1Mixer, transformers.FalconH1Config),
            **(_HYBRID | {"mamba_d_ssm": 128, "mamba_rms_norm": True}),
        ),
        _mamba2(norm_before_gate=True),
    ),
    "falcon h1, factors": Case(
        _of(
            *(FalconH1Mixer, transformers.FalconH1Config),
            **(_HYBRID | {"mamba_d_ssm": 128, "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8]}),
        ),
        _mamba2(None, multipliers=(0.9, 1.1, 0.7, 1.3, 0.8)),
    ),
    "short conv": Case(
        _of(Lfm2ShortConv, transformers.Lfm2Config, full_attn_idxs=[]),
        ShortConvSpec(channels=HIDDEN, taps=3, biased=False),
    ),
    "short conv, biases": Case(
        _of(Lfm2ShortConv, transformers.Lfm2Config, full_attn_idxs=[], conv_bias=True, conv_L_cache=4),
        ShortConvSpec(channels=HIDDEN, taps=4, biased=True),
    ),
    "delta rule": Case(
        _of(
            *(Qwen3NextGatedDeltaNet, transformers.Qwen3NextConfig),
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            rms_norm_eps=1e-5,
        ),
        DeltaSpec(num_heads=4, head_dim=24, key_heads=2, key_dim=16, taps=4, norm=RMS),
    ),
}


def reference(case: Case) -> torch.nn.Module:
    torch.manual_seed(3)
    module = case.module().float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    if isinstance(module, FalconH1Mixer):
        from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

        config = transformers.FalconH1Config(
            hidden_size=HIDDEN,
            **(_HYBRID | {"mamba_d_ssm": 128, "ssm_multipliers": list(case.spec.multipliers)}),  # type: ignore[union-attr]
        )
        module.mup_vector = compute_mup_vector(config)
    return module


def mixer_of(case: Case, module: torch.nn.Module, dtype: torch.dtype) -> Sublayer:
    """Declare the mixer and load the module's tensors."""
    weights = WeightPlan(dtype, CPU)
    setting = Setting(CPU, dtype, open_quantization("none"))
    declared = mixer(Scope(setting, weights, Names(layer="layers.{layer}"), HIDDEN, layer=LAYER), case.spec)
    weights.reservation = reserve(weights.stores)
    prefix = f"layers.{LAYER}.mixer."
    tensors = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    for name, expected in weights.expected.items():
        tensor = tensors.pop(name)
        assert tuple(tensor.shape) == expected.shape, name
        for sink in (*expected.sinks, *expected.packers):
            sink(tensor.detach())
    assert all("norm" in name for name in tensors), f"unread tensors: {list(tensors)}"  # without weights
    return declared


def spec_of(case: Case, dtype: torch.dtype) -> KvSpec:
    size = case.spec.state_need.num_bytes(dtype.itemsize)
    return group_layers([LayerKv(layer, "state", state_bytes=size) for layer in range(LAYER + 1)], 16)


Cut = tuple[int, int, int]
"""A request's slot, its first token in a step, and the number of tokens."""


class Served:
    """Steps of a mixer with plans made by hand."""

    def __init__(self, case: Case, mixer: Sublayer, dtype: torch.dtype, recorded: bool) -> None:
        self._spec, self._dtype, self._mixer = spec_of(case, dtype), dtype, mixer
        self._tables = SlotTables(4, NUM_TOKENS, self._spec, CPU)
        shape = (NUM_BLOCKS, self._spec.layer_bytes)
        # NaN in every format, as left by a previous request.
        self.places = [torch.full(shape, 0xFF, dtype=torch.uint8) for _ in range(LAYER + 1)]
        self._recorded = recorded
        if recorded:
            library = program_library()
            assert library is not None
            memory = KvMemory(self._spec, self.places, dtype)
            recorder = GraphBuilder(library, dtype, memory, 2 * NUM_TOKENS, 4)
            self._x = torch.zeros((2 * NUM_TOKENS, HIDDEN), dtype=dtype)
            y = mixer(recorder, Value(HIDDEN, Extent.TOKENS, self._x))
            recorder.keep(y)
            self._end = recorder.finish().spans[-1].end
            assert y.tensor is not None
            self._y, self._recorder, self._library = y.tensor, recorder, library
            self._step = Step(library, 2 * NUM_TOKENS, 4)

    def step(self, cuts: list[Cut], blocks: list[tuple[int, int]], x: torch.Tensor) -> torch.Tensor:
        """Compute a step of some rows; blocks: read and written block of each; x: of all rows."""
        entries = [
            (slot, 0, position, named)
            for (slot, _, _), both in zip(cuts, blocks, strict=True)
            for position, named in enumerate(both)
        ]
        slots, starts, counts = (pack_i32([cut[i] for cut in cuts]) for i in range(3))
        plan = StepPlan(
            step=1,
            sent_ns=0,
            freed=b"",
            new_rows=[],
            blocks=pack_i32([number for entry in entries for number in entry]),
            copies=b"",
            slots=slots,
            starts=starts,
            counts=counts,
            samples=bytes(len(cuts)),
        )
        self._tables.apply(plan)
        rows = Rows(plan)
        if not self._recorded:
            kv = KvMemory(self._spec, self.places, self._dtype)
            empty = torch.empty(0)
            batch = Batch(
                *(len(x), empty, empty, None, (), empty, empty, {}),
                {0: state_rows(rows, self._tables, 0)},
            )
            return self._mixer(EagerPass(batch, kv, [(empty, empty)]), x)
        self._step.fill(rows, self._tables)
        self._x[: len(x)] = x
        self._library.run(self._recorder.handle, self._step.address, 0, self._end)
        return self._y[: len(x)].clone()


def in_steps(served: Served, x: torch.Tensor, others: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Compute ``x`` in steps of these sizes, another request's tokens before it in each; return its results."""
    pieces, begin, begun = [], 0, 0
    for number, size in enumerate(sizes):
        besides = min(2 * number + 1, len(others) - begun)
        cuts = [(3, begun, besides), (1, begin, size)] if besides else [(1, begin, size)]
        mine = (number % 2, 1 - number % 2) if number % 3 else (0 if number % 2 == 0 else 1, 1 - number % 2)
        blocks = [(4, 4), mine] if besides else [mine]
        tokens = torch.cat((others[begun : begun + besides], x[begin : begin + size]))
        pieces.append(served.step(cuts, blocks, tokens)[besides:])
        begin, begun = begin + size, begun + besides
    assert begin == len(x)
    return torch.cat(pieces)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return tuple(torch.randn(NUM_TOKENS, HIDDEN, generator=draw).to(dtype) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_results_equal_transformers(name: str, recorded: bool) -> None:
    case, dtype = CASES[name], torch.float32
    module = reference(case)
    served = mixer_of(case, module, dtype)
    x, others = inputs(dtype)
    expected = module(x[None])[0]
    for sizes in ([NUM_TOKENS], [1, 1, 9, 1, 25]):
        y = in_steps(Served(case, served, dtype, recorded), x, others, sizes)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_bits_do_not_depend_on_chunks(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    served = mixer_of(case, reference(case), dtype)
    x, others = inputs(dtype)
    expected = in_steps(Served(case, served, dtype, True), x, others[:0], [NUM_TOKENS])
    for sizes in ([1] * NUM_TOKENS, [5, 8, 1, 16, 7]):
        assert torch.equal(in_steps(Served(case, served, dtype, True), x, others, sizes), expected), sizes
