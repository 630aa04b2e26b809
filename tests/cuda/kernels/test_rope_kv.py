"""Norm, rotation and KV write in one launch, against torch operations in sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.cuda.kernels.formats import FORMATS, assert_within_steps, noise, small_integers
from tests.cuda.kernels.references import rope_kv_reference

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.rope_kv import HeadTransform, rope_kv
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.model_config.spec import Temperature

EPS = 1e-6
BLOCK_SIZE, NUM_BLOCKS = 16, 4
KV_ROWS = [0, 17, -1, 63, 16, -1, 33]
"""First and last positions of blocks, out of order, with padding between."""
HEADS = [
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (256, 256),
    (128, 32),
    (80, 32),
    (80, 20),
    (6, 4),
    (512, 512),
]
"""Head width and its rotated part: whole packs, unrotated packs (also an odd number), single numbers, and the maximum width."""


@dataclass
class Inputs:
    """Inputs of one launch, and KV memory filled with ones, so that a wrong write is visible."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv: torch.Tensor
    rows: StepRows

    @property
    def heads(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values."""
        num_kv_heads = self.kv.shape[2]
        return self.qkv.split([self.qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)

    @property
    def kv_rows(self) -> torch.Tensor:
        assert self.rows.kv_rows is not None
        return self.rows.kv_rows


def rows_of(where: torch.device, kv_rows: list[int]) -> StepRows:
    """Rows of which only ``kv_rows`` and positions matter."""
    nothing = torch.empty(0, dtype=torch.int32, device=where)
    positions = torch.arange(100, 100 + len(kv_rows), dtype=torch.int32, device=where)
    return StepRows(
        num_rows=0,
        num_tokens=len(kv_rows),
        max_count=1,
        slots=nothing,
        starts=nothing,
        counts=nothing,
        offsets=nothing,
        token_ids=nothing,
        positions=positions,
        token_rows=nothing,
        block_table=nothing,
        block_size=BLOCK_SIZE,
        kv_rows=torch.tensor(kv_rows, dtype=torch.int32, device=where),
    )


def make_inputs(
    device: Device,
    dtype: torch.dtype,
    head_dim: int = 64,
    rotary_dim: int = 64,
    heads: tuple[int, int] = (4, 2),
    kv_dtype: torch.dtype | None = None,
    whole_numbers: bool = False,
) -> Inputs:
    where, num_tokens = device.torch_device, len(KV_ROWS)
    shape = (num_tokens, heads[0] + 2 * heads[1], head_dim)
    make = small_integers if whole_numbers else noise
    angles = noise(num_tokens, rotary_dim // 2, dtype=torch.float32, where=where, seed=1)
    angles = torch.cat((angles, angles), 1)
    kv = torch.ones((2, NUM_BLOCKS, heads[1], BLOCK_SIZE, head_dim), device=where).to(kv_dtype or dtype)
    return Inputs(
        qkv=make(*shape, dtype=dtype, where=where),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        kv=kv,
        rows=rows_of(where, KV_ROWS),
    )


def fp32_fuses(dtype: torch.dtype) -> float:
    """Return whether the dtype is 16-bit: its products are exact in fp32, so fusing them with a sum changes nothing.

    Products of fp32 numbers are not exact: numbers up to 5 or so then differ by a rounding or two, 2^-21.
    """
    return 1e-6 if dtype == torch.float32 else 0.0


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEADS)
def test_rotation_and_write(device: Device, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    inputs = make_inputs(device, dtype, head_dim, rotary_dim)
    kv = inputs.kv.clone()
    before = inputs.qkv.clone()
    expected = rope_kv_reference(*inputs.heads, inputs.cos, inputs.sin, kv, inputs.rows)
    out = torch.full_like(expected, torch.nan)
    queries = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, out=out)
    assert queries is out
    assert torch.equal(inputs.qkv, before)
    tolerance = fp32_fuses(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(inputs.kv, kv, rtol=0, atol=tolerance)
    assert not out[inputs.kv_rows < 0].any()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 32), (8, 4)])
def test_norm_equals_the_reference_where_the_sum_is_exact(
    device: Device, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    inputs = make_inputs(device, dtype, head_dim, rotary_dim, whole_numbers=True)
    turn = HeadTransform(
        *(noise(head_dim, dtype=dtype, where=device.torch_device, seed=i) for i in (2, 3)), EPS
    )
    kv = inputs.kv.clone()
    expected = rope_kv_reference(*inputs.heads, inputs.cos, inputs.sin, kv, inputs.rows, turn)
    queries = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, turn)
    tolerance = fp32_fuses(dtype)
    torch.testing.assert_close(queries, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(inputs.kv, kv, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 80), (96, 96), (20, 12)])
def test_norm_of_widths_other_than_powers_of_two(device: Device, head_dim: int, rotary_dim: int) -> None:
    """Some lanes have nothing to add. fp32, as a mean in another order differs by a few roundings only."""
    inputs = make_inputs(device, torch.float32, head_dim, rotary_dim)
    weight = noise(head_dim, dtype=torch.float32, where=device.torch_device, seed=2)
    turn = HeadTransform(weight, weight, EPS)
    kv = inputs.kv.clone()
    expected = rope_kv_reference(*inputs.heads, inputs.cos, inputs.sin, kv, inputs.rows, turn)
    queries = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, turn)
    assert_within_steps(queries, expected, 8, floor=1e-5)
    assert_within_steps(inputs.kv, kv, 8, floor=1e-5)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20)])
def test_fp8_cache_saturates(device: Device, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """Whole numbers times 100 and no rotation: only the cache rounds, and some numbers exceed 448."""
    inputs = make_inputs(
        device, dtype, head_dim, rotary_dim, kv_dtype=torch.float8_e4m3fn, whole_numbers=True
    )
    inputs.qkv.mul_(100)
    inputs.cos.fill_(1)
    inputs.sin.fill_(0)
    kv = inputs.kv.clone()
    rope_kv_reference(*inputs.heads, inputs.cos, inputs.sin, kv, inputs.rows)
    rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows)
    assert kv.float().max() == 448
    assert torch.equal(inputs.kv.view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize(
    "turn",
    [
        HeadTransform(),
        HeadTransform(kv_scales=(0.013, 3.7)),
        HeadTransform(interleaved=True, kv_scales=(0.013, 3.7)),
    ],
    ids=["whole", "scaled", "scaled, plainly"],
)
def test_fp8_cache_of_rotated_numbers(device: Device, turn: HeadTransform, head_dim: int) -> None:
    """The cache stores the number in the model's format, divided by the layer's scale, rounded again."""
    inputs = make_inputs(device, torch.bfloat16, head_dim, head_dim, kv_dtype=torch.float8_e4m3fn)
    kv = inputs.kv.clone()
    rope_kv_reference(*inputs.heads, inputs.cos, inputs.sin, kv, inputs.rows, turn)
    rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, turn)
    assert torch.equal(inputs.kv.view(torch.uint8), kv.view(torch.uint8))


def test_in_place(device: Device) -> None:
    """Queries are rotated in place; keys and values of ``qkv`` stay unchanged."""
    inputs = make_inputs(device, torch.bfloat16)
    before = inputs.qkv.clone()
    out = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows)
    assert torch.equal(inputs.qkv, before)
    queries = inputs.heads[0]
    assert (
        rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, out=queries) is queries
    )
    assert torch.equal(inputs.qkv[:, :4], out)
    assert torch.equal(inputs.qkv[:, 4:], before[:, 4:])


def test_separate_tensors(device: Device) -> None:
    """Each with its own rows, some of them strided."""
    inputs = make_inputs(device, torch.bfloat16)
    expected = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows)
    kv = torch.ones_like(inputs.kv)
    q, k, v = inputs.heads
    wide = torch.cat((k, k), 1)[:, :2]
    out = rope_kv(device, q.contiguous(), wide, v.contiguous(), inputs.cos, inputs.sin, kv, inputs.rows)
    assert torch.equal(out, expected)
    assert torch.equal(kv, inputs.kv)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (5, 5)])
def test_bits_of_a_token_do_not_depend_on_the_batch(device: Device, heads: tuple[int, int]) -> None:
    inputs = make_inputs(device, torch.float32, 96, 64, heads)
    weight = noise(96, dtype=torch.float32, where=device.torch_device, seed=2)
    turn = HeadTransform(weight, weight, EPS)
    together = rope_kv(device, *inputs.heads, inputs.cos, inputs.sin, inputs.kv, inputs.rows, turn)
    kv = torch.ones_like(inputs.kv)
    for i, kv_row in enumerate(KV_ROWS):
        one = slice(i, i + 1)
        rows = rows_of(device.torch_device, [kv_row])
        mine = (part[one] for part in (*inputs.heads, inputs.cos, inputs.sin))
        queries = rope_kv(device, *mine, kv, rows, turn)
        assert torch.equal(queries[0], together[i])
    assert torch.equal(kv, inputs.kv)


UNUSUAL = {
    "interleaved": (64, 64, 64, HeadTransform(interleaved=True)),
    "interleaved part": (100, 36, 100, HeadTransform(interleaved=True)),
    "the tail": (72, 10, 40, HeadTransform(rotary_first=62)),
    "the tail, interleaved": (576, 64, 512, HeadTransform(rotary_first=512, interleaved=True)),
    "growing": (64, 32, 64, HeadTransform(temperature=Temperature(0.5, 50, 1))),
    "growing in parts": (64, 32, 64, HeadTransform(temperature=Temperature(0.5, 50, -30, whole=False))),
    "growing without rotation": (64, 0, 64, HeadTransform(temperature=Temperature(0.5, 50, 1))),
    "values of another width": (48, 48, 80, HeadTransform()),
    "no rotation": (80, 0, 80, HeadTransform()),
}
"""Width of keys, of the rotated part, of values, and the transform."""


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("case", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
def test_every_transform(
    device: Device, dtype: torch.dtype, case: tuple[int, int, int, HeadTransform], norm_offset: float | None
) -> None:
    head_dim, rotary_dim, value_dim, turn = case
    where = device.torch_device
    inputs = make_inputs(device, dtype, head_dim, max(2, rotary_dim), whole_numbers=True)
    if norm_offset is not None:
        norms = (noise(head_dim, dtype=dtype, where=where, seed=i) for i in (2, 3))
        q_norm, k_norm = norms
        turn = replace(turn, q_norm=q_norm, k_norm=k_norm, eps=EPS, norm_offset=norm_offset)
    q, k, _ = inputs.heads
    v = noise(len(q), 2, value_dim, dtype=dtype, where=where, seed=7)
    angles = (inputs.cos, inputs.sin) if rotary_dim else (None, None)
    caches = [in_blocks(inputs.kv, value_dim) for _ in range(2)]
    expected = rope_kv_reference(q, k, v, *angles, caches[0], inputs.rows, turn)
    queries = rope_kv(device, q, k, v, *angles, caches[1], inputs.rows, turn)
    steps = 2 if dtype != torch.float32 else 16  # a mean in another order, and log1p of the last bit
    for ours, theirs in ((queries, expected), *zip(caches[1], caches[0], strict=True)):
        assert_within_steps(ours, theirs, steps, floor=1e-5)


def in_blocks(like: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ones, in keys as ``like`` and values of this width; blocks with gaps."""
    _, num_blocks, num_kv_heads, size, head_dim = like.shape
    numbers = num_kv_heads * size * head_dim
    memory = like.new_ones((num_blocks, numbers + num_kv_heads * size * value_dim + 16))
    keys = memory[:, :numbers].unflatten(1, (num_kv_heads, size, head_dim))
    return keys, memory[:, numbers:-16].unflatten(1, (num_kv_heads, size, value_dim))


def test_invalid_tensor_is_named(device: Device) -> None:
    inputs = make_inputs(device, torch.bfloat16)
    q, k, v = inputs.heads
    with pytest.raises(ValueError, match=r"k: expected torch.bfloat16\[7, 2, 64\]"):
        rope_kv(device, q, q, v, inputs.cos, inputs.sin, inputs.kv, inputs.rows)
    with pytest.raises(
        ValueError, match=r"v: expected torch.bfloat16\[7, 2, 64\].* tokens aligned to 16 bytes"
    ):
        unaligned = torch.zeros(7, 129, dtype=torch.bfloat16)[:, 1:].unflatten(1, (2, 64))
        rope_kv(device, q, k, unaligned, inputs.cos, inputs.sin, inputs.kv, inputs.rows)
    with pytest.raises(ValueError, match=r"sin: expected contiguous torch.bfloat16"):
        rope_kv(device, q, k, v, inputs.cos, inputs.sin.float(), inputs.kv, inputs.rows)
    with pytest.raises(ValueError, match=r"kv: expected torch.bfloat16 or torch.float8_e4m3fn"):
        rope_kv(device, q, k, v, inputs.cos, inputs.sin, inputs.kv.half(), inputs.rows)
    with pytest.raises(ValueError, match="both or neither"):
        rope_kv(
            device, q, k, v, inputs.cos, inputs.sin, inputs.kv, inputs.rows, HeadTransform(inputs.qkv[0, 0])
        )
    with pytest.raises(ValueError, match="rows: expected kv_rows of 6 tokens in blocks of 16, got 7"):
        rope_kv(device, q[:6], k[:6], v[:6], inputs.cos[:6], inputs.sin[:6], inputs.kv, inputs.rows)
    with pytest.raises(ValueError, match="out: expected"):
        rope_kv(device, q, k, v, inputs.cos, inputs.sin, inputs.kv, inputs.rows, out=q.float())
