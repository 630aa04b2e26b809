"""A launch's arguments as the driver wants them: by kind, not by what Python happens to hold. Knows no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quintet.executor.cuda.device import Argument, Kernel, LaunchError

Packer = Callable[[Sequence[Argument]], list[np.generic]]


def packer(kernel: Kernel) -> Packer:
    """Return the function that turns a launch's arguments into scalars whose bytes are the kernel's parameters.

    Made once per kernel: what is left per launch is one call per argument. An int that 32 bits do not hold raises
    `OverflowError`, as numpy does.
    """
    unknown = set(kernel.kinds) - set(_CONVERTERS)
    if unknown:
        raise LaunchError(
            f"{kernel.module}.cu: {kernel.name}: kinds {kernel.kinds!r}; p, i, l and f are known"
        )
    converters = [_CONVERTERS[kind] for kind in kernel.kinds]

    def pack(args: Sequence[Argument]) -> list[np.generic]:
        return [convert(value) for convert, value in zip(converters, args, strict=True)]

    return pack


def _address(value: torch.Tensor | None) -> np.generic:
    return np.intp(0) if value is None else np.intp(value.data_ptr())


_CONVERTERS: dict[str, Callable[..., np.generic]] = {
    "p": _address,
    "i": np.int32,
    "l": np.int64,
    "f": np.float32,
}
