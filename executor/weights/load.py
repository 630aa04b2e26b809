"""Streams a checkpoint into a model: tensors go from the mapped file straight to what packs or keeps them.

Only safetensors are read: a pickled ``.bin`` file can run code.
"""

from __future__ import annotations

import math
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from quintet.executor.weights.files import checkpoint_files
from quintet.executor.weights.mapped import MappedFile
from quintet.executor.weights.packed_cache import PackedCache
from quintet.executor.weights.plan import Expected, WeightPlan
from quintet.executor.weights.store import reserve
from quintet.wire.errors import ConfigError

SHOW_PROGRESS_FROM_BYTES = 1 << 30
MAX_UINT64 = (1 << 64) - 1

READ_FORMATS = ("BF16", "F16", "F32", "F64")
"""Number formats of checkpoints, as safetensors names them: whoever quantized one says elsewhere what its numbers mean."""

HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old versions of transformers saved beside the weights; they are computed, not read."""


def load_checkpoint(
    plan: WeightPlan,
    folder: Path,
    ignored: frozenset[str] = frozenset(),
    cache: PackedCache | None = None,
) -> None:
    """Deliver every tensor that ``plan`` expects from the safetensors of ``folder``.

    ``ignored`` names tensors that a checkpoint may hold although the model does not read them (a tied output layer).
    With a ``cache``, what is packed there is mapped, and otherwise written there. Raises `ConfigError`, one line, for a
    tensor that is missing, superfluous or of another shape; nothing is read before the headers of all files were checked.
    """
    files = [MappedFile(path) for path in checkpoint_files(folder)]
    _check_names(plan, folder, files, ignored)
    if cache is not None and plan.stores and cache.open(files, plan.stores):
        _deliver(plan, files, packed=True)
        return
    plan.reservation = reserve(plan.stores)
    _deliver(plan, files, packed=False)
    if cache is None or plan.reservation is None:
        return
    if cache.write(files, plan.stores, plan.reservation.memory) and cache.open(files, plan.stores):
        plan.reservation = None  # instead of it the file: other servers share these pages


def fill_randomly(plan: WeightPlan, seed: int) -> None:
    """Deliver seeded random numbers of a sane scale: for trying sizes without a checkpoint.

    Their spread is that of initialised weights to within a factor of the square root of two, and they are made without
    arithmetic: drawing a normal number takes longer than packing it. On a GPU they are drawn there, and are others.
    """
    plan.reservation = reserve(plan.stores)
    if plan.device.type == "cuda":
        for name, expected in plan.expected.items():
            drawn_there = random_tensor_on(plan.device, name, expected, plan.dtype, seed)
            for sink in (*expected.sinks, *expected.packers):
                sink(drawn_there)
        return
    names = list(plan.expected)
    with ThreadPoolExecutor(1) as ahead:  # the next tensor is drawn while this one is packed

        def draw(name: str) -> Future[torch.Tensor]:
            return ahead.submit(random_tensor, name, plan.expected[name], plan.dtype, seed)

        drawn = draw(names[0])
        for name, following in zip(names, (*names[1:], None), strict=True):
            tensor = drawn.result()
            if following is not None:
                drawn = draw(following)
            for sink in (*plan.expected[name].sinks, *plan.expected[name].packers):
                sink(tensor)


def _deliver(plan: WeightPlan, files: list[MappedFile], packed: bool) -> None:
    with tqdm(
        total=len(plan.expected),
        desc="weights",
        unit="tensor",
        file=sys.stderr,
        disable=plan.num_bytes < SHOW_PROGRESS_FROM_BYTES,
    ) as progress:
        for file in files:
            for name in file:
                expected = plan.expected.get(name)
                sinks = [] if expected is None else expected.sinks
                packers = [] if expected is None or packed else expected.packers
                if sinks or packers:
                    tensor = file.tensor(name)
                    for sink in (*sinks, *packers):
                        sink(tensor)
                    file.drop(name)
                    progress.update()


def random_tensor(name: str, expected: Expected, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers of either sign between a power of two and its double: random bits, but for the exponent."""
    generator = np.random.Generator(np.random.SFC64([seed & MAX_UINT64, zlib.crc32(name.encode())]))
    count = math.prod(expected.shape)
    words = generator.integers(0, MAX_UINT64, -(-count * dtype.itemsize // 8), np.uint64, endpoint=True)
    bits = torch.from_numpy(words.view(np.uint8)).view(_integer_of(dtype))[:count]
    return _numbers_of(bits, expected, dtype)


def random_tensor_on(
    device: torch.device, name: str, expected: Expected, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """Return other numbers of the same kind, drawn where they will be: copying them there takes longer than all else."""
    generator = torch.Generator(device).manual_seed(
        (seed << 32 ^ zlib.crc32(name.encode())) & (MAX_UINT64 >> 1)
    )
    integer = _integer_of(dtype)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max + 1
    count = math.prod(expected.shape)
    bits = torch.randint(low, high, (count,), dtype=integer, device=device, generator=generator)
    return _numbers_of(bits, expected, dtype)


def _integer_of(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def _numbers_of(bits: torch.Tensor, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """Replace the exponents of random ``bits``, in place, by the one that gives the expected scale."""
    if expected.scale == 0.0:
        return torch.ones(expected.shape, dtype=dtype, device=bits.device)

    def bits_of(value: float) -> int:
        return int(torch.tensor(value, dtype=dtype).view(bits.dtype).item())

    # An even spread over (2^e, 2^(e+1)) has a mean square of 7/3 * 4^e.
    power = 2.0 ** round(math.log2(expected.scale / math.sqrt(7 / 3)))
    bits.bitwise_and_(~bits_of(math.inf)).bitwise_or_(bits_of(power))
    return bits.view(dtype).view(expected.shape)


def _check_names(plan: WeightPlan, folder: Path, files: list[MappedFile], ignored: frozenset[str]) -> None:
    missing = set(plan.expected)
    for file in files:
        for name, entry in file.entries.items():
            expected = plan.expected.get(name)
            if expected is None:
                if name in ignored or name.endswith(HARMLESS_ENDINGS):
                    continue
                what = f"{name!r:.80} {list(entry.shape)!s:.80}"
                raise ConfigError(
                    f"{file.path}: holds a tensor {what} that config.json's architecture has no place for;"
                    " the weights belong to another model"
                )
            if entry.shape != expected.shape:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has shape {list(entry.shape)!s:.80}; config.json asks for"
                    f" {list(expected.shape)}"
                )
            if entry.dtype not in READ_FORMATS:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has the number format {entry.dtype}; it must be one of"
                    f" {', '.join(READ_FORMATS)}: quantized checkpoints are not supported, use the original one"
                )
            missing.discard(name)
    if missing:
        name = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{files[0].path if len(files) == 1 else folder}: tensor {name!r} {list(plan.expected[name].shape)} is missing{more};"
            " the download may be incomplete"
        )
