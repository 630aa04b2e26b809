"""Stream a checkpoint into a model: each tensor goes from the mapped file to its sinks."""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.checkpoints.weights.files import (
    INDEX_FILE,
    PICKLED,
    SINGLE_FILE,
    checkpoint_files,
    is_stale,
)
from quintet.executor.checkpoints.weights.mapped import DTYPES, MappedFile, WeightFile
from quintet.executor.checkpoints.weights.names import expected_names
from quintet.executor.checkpoints.weights.packed_cache import PackedCache
from quintet.executor.checkpoints.weights.pickled import PickledFile
from quintet.executor.checkpoints.weights.plan import Codes, Expected, WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.model_config.names import spellings
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

SHOW_PROGRESS_FROM_BYTES = 1 << 30
MAX_UINT64 = (1 << 64) - 1


def load_checkpoint(
    plan: WeightPlan,
    files: Sequence[WeightFile],
    cache: PackedCache | None = None,
    ahead: HugeMemory | None = None,
) -> None:
    """Deliver every tensor that ``plan`` expects from the files of a checkpoint.

    With a ``cache``, packed weights are mapped from it, or written to it. ahead: see `reserve`. Raises `ConfigError`
    for a tensor that is missing, unexpected or of another shape, before any tensor is read.
    """
    names = expected_names(plan, files)
    _check_tied(plan, files)
    if cache is not None and plan.stores and cache.open(files, plan.stores):
        _deliver(plan, files, names, packed=True)
        return
    plan.reservation = reserve(plan.stores, ahead)
    _deliver(plan, files, names, packed=False)
    if cache is None or plan.reservation is None:
        return
    if cache.write(files, plan.stores, plan.reservation.memory) and cache.open(files, plan.stores):
        plan.reservation = None  # replaced by the mapped file: servers share its pages


def _check_tied(plan: WeightPlan, files: Sequence[WeightFile]) -> None:
    """Reject a pickled checkpoint with two different tensors that the config declares tied.

    For safetensors `deploy` corrects the config earlier (`quintet.deploy.config.model.hf_config`).
    """
    pickled = {name: file for file in files if isinstance(file, PickledFile) for name in file}
    for name, other in plan.aliases.items():
        first = next((each for each in spellings(name, plan.prefix) if each in pickled), None)
        if first is None or other not in pickled:
            continue
        one, two = pickled[first].tensor(first), pickled[other].tensor(other)
        if one.shape == two.shape and one.data_ptr() != two.data_ptr() and not torch.equal(one, two):
            raise ConfigError(
                f"{pickled[other].path}: tensor {other!r} is not {first!r}, but config.json ties them: write"
                ' "tie_word_embeddings": false into config.json'
            )


def fill_randomly(plan: WeightPlan, seed: int) -> None:
    """Deliver seeded random values of a typical scale, to test sizes without a checkpoint.

    The spread is that of initialised weights, within a factor of the square root of two. The values need no
    arithmetic: drawing normal values takes longer than packing them. A GPU draws its own, different values.
    """
    plan.reservation = reserve(plan.stores)
    if plan.device.type == "cuda":
        for name, expected in plan.expected.items():
            drawn_on_device = random_tensor_on(plan.device, name, expected, plan.dtype, seed)
            for sink in (*expected.sinks, *expected.packers):
                sink(drawn_on_device)
        return
    names = list(plan.expected)
    with ThreadPoolExecutor(1) as ahead:  # draws the next tensor during packing

        def draw(name: str) -> Future[torch.Tensor]:
            return ahead.submit(random_tensor, name, plan.expected[name], plan.dtype, seed)

        drawn = draw(names[0])
        for name, following in zip(names, (*names[1:], None), strict=True):
            tensor = drawn.result()
            if following is not None:
                drawn = draw(following)
            for sink in (*plan.expected[name].sinks, *plan.expected[name].packers):
                sink(tensor)


def open_files(folder: Path) -> list[WeightFile]:
    """Open the files of a checkpoint."""
    paths = checkpoint_files(folder)
    if paths == [folder / SINGLE_FILE] and (folder / INDEX_FILE).exists() and is_stale(folder / INDEX_FILE):
        log.info("%s lists missing files; %s is read instead", INDEX_FILE, paths[0])
    if paths[0].suffix not in PICKLED:
        return [MappedFile(path) for path in paths]
    log.info(
        "%s: pickled weights, loaded by torch's weights-only reader; `quintet convert %s` writes safetensors",
        *(paths[0], folder),
    )
    return [PickledFile(path) for path in paths]


def _deliver(plan: WeightPlan, files: Sequence[WeightFile], names: Mapping[str, str], packed: bool) -> None:
    with tqdm(
        total=len(plan.expected),
        desc="weights",
        unit="tensor",
        file=sys.stderr,
        disable=plan.num_bytes < SHOW_PROGRESS_FROM_BYTES,
    ) as progress:
        for file in files:
            for name in file:
                if name not in names:
                    continue
                expected = plan.expected[names[name]]
                packers = [] if packed else expected.packers
                if expected.sinks or packers:
                    tensor = file.tensor(name)
                    for sink in (*expected.sinks, *packers):
                        sink(tensor)
                    file.drop(name)
                    progress.update()


def random_tensor(name: str, expected: Expected, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of either sign between a power of two and its double: random bits with a fixed exponent."""
    if expected.codes is not None:
        return _random_codes(expected.shape, expected.codes, seed)
    generator = np.random.Generator(np.random.SFC64([seed & MAX_UINT64, zlib.crc32(name.encode())]))
    count = math.prod(expected.shape)
    words = generator.integers(0, MAX_UINT64, -(-count * dtype.itemsize // 8), np.uint64, endpoint=True)
    bits = torch.from_numpy(words.view(np.uint8)).view(_integer_of(dtype))[:count]
    return _numbers_of(bits, expected, dtype)


def random_tensor_on(
    device: torch.device, name: str, expected: Expected, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """Return values of the same kind, drawn on the device; copying them there would take longer than everything else."""
    if expected.codes is not None:
        return _random_codes(expected.shape, expected.codes, seed)
    generator = torch.Generator(device).manual_seed(
        (seed << 32 ^ zlib.crc32(name.encode())) & (MAX_UINT64 >> 1)
    )
    integer = _integer_of(dtype)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max + 1
    count = math.prod(expected.shape)
    bits = torch.randint(low, high, (count,), dtype=integer, device=device, generator=generator)
    return _numbers_of(bits, expected, dtype)


def _random_codes(shape: tuple[int, ...], codes: Codes, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed & (MAX_UINT64 >> 1))
    dtype, (least, most) = DTYPES[codes.kinds[0]], codes.dummies
    count = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(least, most + 1, (count,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


def _integer_of(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def _numbers_of(bits: torch.Tensor, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """Replace the exponents of random ``bits``, in place, with that of the expected scale."""
    if expected.scale == 0.0:
        return torch.ones(expected.shape, dtype=dtype, device=bits.device)

    def bits_of(value: float) -> int:
        return int(torch.tensor(value, dtype=dtype).view(bits.dtype).item())

    # A uniform spread over (2^e, 2^(e+1)) has a mean square of 7/3 * 4^e.
    power = 2.0 ** round(math.log2(expected.scale / math.sqrt(7 / 3)))
    bits.bitwise_and_(~bits_of(math.inf)).bitwise_or_(bits_of(power))
    return bits.view(dtype).view(expected.shape)
