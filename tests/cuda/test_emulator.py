"""Primitives of the kernels, and the errors that only the emulator detects."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.cuda.emulated import EmulatedDevice, KernelError

from quintet.executor.backends.cuda.device import Argument, Device, Kernel, LaunchError

INT = torch.int32
ONE = (1, 1, 1)


def kernel(name: str, kinds: str) -> Kernel:
    return Kernel("selftest", f"selftest_{name}", kinds)


def on(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device.torch_device)


def test_shuffles_and_votes(device: Device) -> None:
    values = torch.randn(32)
    out = on(device, torch.empty(7, 32))
    device.launch(kernel("shuffles", "pp"), ONE, (32, 1, 1), [on(device, values), out])
    lane = torch.arange(32)
    down = torch.where(lane + 3 < 32, lane + 3, lane)
    up = torch.where(lane % 16 >= 3, lane - 3, lane)
    sources = [torch.full((32,), 5), lane // 8 * 8 + lane * 7 % 8, lane ^ 9, down, up]
    sources.append(torch.where(lane < 16, lane ^ 1, lane ^ 2))
    assert torch.equal(out[:6].cpu(), values[torch.stack(sources)])
    assert out[6].tolist() == [float((values > 0).sum()) + 100] * 32


@pytest.mark.parametrize(("suffix", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_matrix_multiplication_through_shared_memory(device: Device, suffix: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    d = on(device, torch.empty(16, 8))
    device.launch(kernel(f"multiply_{suffix}", "ppp"), ONE, (32, 1, 1), [on(device, a), on(device, b), d])
    # 16 products of numbers of size 1 to 10, summed in float32 in the device's order.
    torch.testing.assert_close(d.cpu(), (a.double() @ b[:8].double().T).float(), rtol=0, atol=2e-5)


def test_matrices_are_loaded_plain_and_transposed(device: Device) -> None:
    matrices = torch.arange(4 * 64, dtype=torch.int16).view(4, 8, 8)
    plain, transposed = on(device, torch.empty_like(matrices)), on(device, torch.empty_like(matrices))
    args = [on(device, matrices), plain, transposed]
    device.launch(kernel("matrices", "ppp"), ONE, (32, 1, 1), args, shared_bytes=512)
    assert torch.equal(plain.cpu(), matrices)
    assert torch.equal(transposed.cpu(), matrices.transpose(1, 2))


def test_reductions_have_one_order(device: Device) -> None:
    values = torch.randn(3, 128)
    values[2] = values[0]
    sums, maxima = on(device, torch.empty(3, 128)), on(device, torch.empty(3, 128))
    device.launch(kernel("reductions", "ppp"), (3, 1, 1), (128, 1, 1), [on(device, values), sums, maxima])
    assert torch.equal(maxima.cpu(), (values.amax(1, keepdim=True) + 127).expand(3, 128))
    assert torch.equal(sums.cpu(), sums[:, :1].cpu().expand(3, 128))
    assert torch.equal(sums[0], sums[2])
    # 128 numbers of size one: the error of a float32 sum.
    torch.testing.assert_close(sums[:, 0].cpu(), values.sum(1) + 128, rtol=1e-6, atol=0)


def test_widening_equals_torch(device: Device) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    eight = bits.to(torch.uint8)
    outs = [on(device, torch.empty(65536)) for _ in range(3)]
    pairs = [on(device, torch.empty(65536, 2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    args: list[Argument] = [on(device, bits), on(device, bits), on(device, eight), *outs, *pairs, 65536]
    device.launch(kernel("widen", "ppppppppi"), (512, 1, 1), (128, 1, 1), args)
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    for source, dtype, out in zip((bits, bits, eight), dtypes, outs, strict=True):
        assert torch.equal(bits_of(out.cpu()), bits_of(source.view(dtype).float())), dtype
    next_number = eight.view(-1, 2).flip(1).reshape(-1)
    both = torch.stack([eight, next_number], 1).view(torch.float8_e4m3fn).float()
    for pair in pairs:
        assert torch.equal(bits_of(pair.cpu().float()), bits_of(both))


def test_rounding_equals_torch(device: Device) -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = (
        torch.randint(-(2**31), 2**31, (40000,), generator=generator).to(torch.int32).view(torch.float32)
    )
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()]
    halfway = (numbers[:-1] + numbers[1:]) / 2  # ties of fp8, and the numbers next to them
    near = torch.cat([halfway, torch.nextafter(halfway, numbers[1:]), torch.nextafter(halfway, numbers[:-1])])
    values = torch.cat([patterns, torch.randn(20000, generator=generator) * 100, numbers, near])
    values = torch.cat(
        [values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 464.0, 1e9, 2**-10])]
    )
    count = len(values)
    a, b, c = (
        on(device, torch.empty(count, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    )
    pairs = on(device, torch.empty(count, 2, dtype=torch.bfloat16))
    args: list[Argument] = [on(device, values), a, b, c, pairs, count]
    device.launch(kernel("narrow", "pppppi"), (-(-count // 128), 1, 1), (128, 1, 1), args)
    assert torch.equal(bits_of(a.cpu().float()), bits_of(values.bfloat16().float()))
    assert torch.equal(bits_of(b.cpu().float()), bits_of(values.half().float()))
    # torch turns overflow into NaN; our conversion saturates
    saturated = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(bits_of(c.cpu().float()), bits_of(saturated))
    assert torch.equal(
        bits_of(pairs.cpu().float()), bits_of(torch.stack([values, -values], 1).bfloat16().float())
    )


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bits without sign and payload of NaN, which differ between devices."""
    return torch.where(numbers.isnan(), torch.full_like(numbers, torch.nan), numbers).view(torch.int32)


def test_packs_hold_sixteen_bytes_of_each_format(device: Device) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32)
    ins = [on(device, (torch.arange(512 // dtype.itemsize) % 16 - 8).to(dtype)) for dtype in dtypes]
    outs = [torch.empty_like(tensor) for tensor in ins]
    device.launch(kernel("packs", "pppppppp"), ONE, (32, 1, 1), [*ins, *outs])
    for tensor, out in zip(ins, outs, strict=True):
        assert torch.equal(out.float(), 2 * tensor.float())


def test_async_copies_complete_by_group(device: Device) -> None:
    numbers = torch.arange(256, dtype=INT)
    first, second = on(device, torch.empty(128, dtype=INT)), on(device, torch.empty(128, dtype=INT))
    args = [on(device, numbers), first, second]
    device.launch(kernel("groups", "ppp"), ONE, (32, 1, 1), args, shared_bytes=1024)
    assert first.tolist() == list(range(128))
    assert second.tolist() == [*range(128, 192), *[0] * 64]


def test_atomics_and_indices(device: Device) -> None:
    count, highest, total = (on(device, torch.zeros(1, dtype=dtype)) for dtype in (INT, INT, torch.float32))
    device.launch(kernel("atomics", "ppp"), (5, 1, 1), (64, 1, 1), [count, highest, total])
    assert (count.item(), highest.item(), total.item()) == (320, 319, 160.0)
    out = on(device, torch.empty(2, 3, 2, 2, 5, 3, 6, dtype=INT))
    device.launch(kernel("indices", "p"), (2, 3, 2), (3, 5, 2), [out])
    blocks = torch.stack(torch.meshgrid(*map(torch.arange, (2, 3, 2)), indexing="ij"), -1).flip(-1)
    threads = torch.stack(torch.meshgrid(*map(torch.arange, (2, 5, 3)), indexing="ij"), -1).flip(-1)
    assert torch.equal(out.view(12, 30, 6)[..., :3].cpu().long(), threads.view(1, 30, 3).expand(12, 30, 3))
    assert torch.equal(out.view(12, 30, 6)[..., 3:].cpu().long(), blocks.view(12, 1, 3).expand(12, 30, 3))


def test_bank_conflicts_of_matrix_loads_are_counted() -> None:
    emulated, matrices = EmulatedDevice(), torch.zeros(4, 8, 8, dtype=torch.int16)
    args = [matrices, torch.empty_like(matrices), torch.empty_like(matrices)]
    emulated.launch(kernel("matrices", "ppp"), ONE, (32, 1, 1), args, shared_bytes=512)
    assert emulated.matrix_loads == (8, 0)
    a = torch.zeros(16, 16, dtype=torch.bfloat16)
    emulated.launch(kernel("multiply_bf16", "ppp"), ONE, (32, 1, 1), [a, a, torch.empty(16, 8)])
    assert emulated.matrix_loads == (8, 8)  # rows 32 bytes apart: eight of them touch four places, each twice


def test_events_can_be_held_back() -> None:
    emulated = EmulatedDevice()
    before = emulated.record()
    emulated.hold()
    event = emulated.record()
    assert before.is_done() and not event.is_done()
    emulated.release_events()
    event.wait()
    assert event.is_done() and emulated.record().is_done()
    assert event.elapsed_ms(before) >= 0


# From here on: wrong kernels, which only an emulator may run.


def test_async_copy_read_too_early_is_garbage() -> None:
    numbers = torch.arange(256, dtype=INT)
    expected = numbers.roll(-4)
    copies = kernel("copies", "ppii")
    for seed in range(4):
        out = torch.zeros(256, dtype=INT)
        emulated = EmulatedDevice(seed=seed)
        emulated.launch(copies, ONE, (64, 1, 1), [numbers, out, 1, 1], shared_bytes=1024)
        assert torch.equal(out, expected)
        emulated.launch(copies, ONE, (64, 1, 1), [numbers, out, 0, 1], shared_bytes=1024)
        assert (out == -1).all()
        emulated.launch(copies, ONE, (64, 1, 1), [numbers, out, 1, 0], shared_bytes=1024)
        assert (out == -1).any()


def test_race_gives_different_results_under_different_seeds() -> None:
    outcomes = set()
    for seed in range(4):
        out = torch.zeros(64, dtype=INT)
        EmulatedDevice(seed=seed).launch(kernel("race", "p"), ONE, (64, 1, 1), [out])
        outcomes.add(tuple(out.tolist()))
    assert len(outcomes) > 1


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (0, r"__syncthreads\(\): 63 of the block's 64 threads wait there, 1 have returned"),
        (2, r"__syncthreads\(\): 1 of the block's 64 threads wait there, 63 have returned"),
        (3, r"lane \d+ of its warp is at __shfl"),
        (4, "does not name its own lane"),
        (5, r"selftest.cu:\d+: address 0x\w+ is not aligned"),
        (6, r"wrote \d+ bytes past its 1024 bytes"),
        (7, "is not in the block's shared memory"),
        (8, r"waits for ever at .*; thread .* waits at "),
        (9, r"reads or writes \d+ bytes from the beginning of argument 0; its storage has 256"),
        (10, "divides an integer by zero"),
    ],
)
def test_invalid_kernel_operations_are_reported(way: int, message: str) -> None:
    out = torch.zeros(64, dtype=INT)
    with pytest.raises(
        KernelError, match=rf"selftest.cu: selftest_wrong: block \(0, 0, 0\), thread .*{message}"
    ):
        EmulatedDevice().launch(kernel("wrong", "pi"), ONE, (64, 1, 1), [out, way], shared_bytes=1024)


def test_writes_into_the_padding_of_a_tensor_are_reported() -> None:
    with pytest.raises(KernelError, match="wrote past argument 0"):
        EmulatedDevice().launch(kernel("race", "p"), ONE, (64, 1, 1), [torch.zeros(63, dtype=INT)])


def test_warps_may_diverge() -> None:
    out = torch.zeros(64, dtype=INT)
    EmulatedDevice().launch(kernel("wrong", "pi"), ONE, (64, 1, 1), [out, 1], shared_bytes=1024)


@pytest.mark.parametrize(
    ("name", "kinds", "args", "message"),
    [
        ("race", "pp", [None, None], "takes 'p', its Kernel says 'pp'"),
        ("nothing", "p", [None], "no kernel 'selftest_nothing'"),
        ("race", "p", [], "0 arguments given; expected 1"),
        ("race", "p", [3], "expected a tensor or None"),
        ("wrong", "pi", [None, 2**31], "which exceeds 32 bits"),
        ("wrong", "pi", [None, 1.5], "expected an int"),
    ],
)
def test_invalid_launches_are_rejected(name: str, kinds: str, args: list[Argument], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        EmulatedDevice().launch(kernel(name, kinds), ONE, (64, 1, 1), args)


def test_invalid_sizes_are_rejected() -> None:
    emulated, out = EmulatedDevice(), torch.zeros(64, dtype=INT)
    for grid, block, shared_bytes, message in [
        ((1, 65536, 1), (64, 1, 1), 0, "grid"),
        (ONE, (1025, 1, 1), 0, "block"),
        (ONE, (96, 1, 1), 0, "up to 64 threads"),
        (ONE, (64, 1, 1), 228 * 1024, "dynamic shared memory"),
    ]:
        with pytest.raises(LaunchError, match=message):
            emulated.launch(kernel("race", "p"), grid, block, [out], shared_bytes)


def test_concurrent_replays_find_named_operations() -> None:
    """Two threads that first dispatch concurrently would name an operation twice, and call a freed object."""
    alone = """
import torch
from tests.cuda.emulated import EmulatedDevice

def is_named():
    return "int" in vars(torch.ops.aten.unflatten)

assert not is_named()
EmulatedDevice()
assert not is_named()
EmulatedDevice(rank=0)
assert is_named()
"""
    subprocess.run([sys.executable, "-c", alone], check=True)
