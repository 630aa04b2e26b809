"""Streams a checkpoint into a model: one tensor in memory at a time beside the model itself.

Only safetensors are read: a pickled ``.bin`` file can run code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from quintet.executor.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHOW_PROGRESS_FROM_BYTES = 1 << 30

HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that old versions of transformers saved beside the weights; they are computed, not read."""


def load_checkpoint(plan: WeightPlan, folder: Path, ignored: frozenset[str] = frozenset()) -> None:
    """Fill every target of ``plan`` from the safetensors of ``folder``.

    ``ignored`` names tensors that a checkpoint may hold although the model does not read them (a tied output layer).
    Raises `ConfigError`, one line, for a tensor that is missing, superfluous or of another shape.
    """
    files = _files(folder)
    missing = set(plan.targets)
    with tqdm(
        total=len(missing),
        desc="weights",
        unit="tensor",
        file=sys.stderr,
        disable=plan.num_bytes < SHOW_PROGRESS_FROM_BYTES,
    ) as progress:
        for path in files:
            for name, tensor in _tensors(path):
                target = plan.targets.get(name)
                if target is None:
                    if name in ignored or name.endswith(HARMLESS_ENDINGS):
                        continue
                    raise ConfigError(
                        f"{path}: holds a tensor {name!r} {list(tensor.shape)} that config.json's architecture has no place for;"
                        " the weights belong to another model"
                    )
                if tensor.shape != target.shape:
                    raise ConfigError(
                        f"{path}: tensor {name!r} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
                    )
                target.copy_(tensor)
                missing.discard(name)
                progress.update()
    if missing:
        name = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{files[0] if len(files) == 1 else folder}: tensor {name!r} {list(plan.targets[name].shape)} is missing{more};"
            " the download may be incomplete"
        )


def fill_randomly(plan: WeightPlan, seed: int) -> None:
    """Fill every target with seeded random numbers of a sane scale: for trying sizes without a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    for name, target in plan.targets.items():
        scale = plan.scales[name]
        if scale == 0.0:
            target.fill_(1.0)
        else:
            values = torch.randn(target.shape, generator=generator, dtype=torch.float32)
            target.copy_(values.mul_(scale))


def _files(folder: Path) -> list[Path]:
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not a safetensors index ({error}); download it again") from error
        files = [folder / name for name in names]
        for name, path in zip(names, files, strict=True):
            if Path(name).name != name:
                raise ConfigError(f"{index}: names {name!r}, which is not a plain file name beside it")
            if not path.exists():
                raise ConfigError(f"{path}: is missing, though {INDEX_FILE} lists it; download it again")
        return files
    if single.exists():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return others
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder}: has only pickled weights, which can run code and are not read; convert them with"
            " transformers' save_pretrained, which writes safetensors"
        )
    raise ConfigError(
        f"{folder}: has no weights ({SINGLE_FILE} or {INDEX_FILE}); use --load-format dummy to do without"
    )


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no iterator
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from error
