"""Print the instruction set in use, then steps of attention with digests of their results."""

from __future__ import annotations

import hashlib

import torch
from tests.executor.kernels.instruction_sets import isa
from tests.executor.kernels.paged_requests import PLAIN, Features, Requests, Shape

HEADS = [(7, 1, 64), (4, 2, 80), (40, 1, 16), (8, 2, 128), (2, 1, 256)]
FEATURES = {"plain": PLAIN, "window": Features(window=90), "softcap": Features(softcap=3.0)}


def main() -> None:
    """Compute prompts, chunks and single tokens."""
    print(isa())
    for kv_dtype in (torch.bfloat16, torch.int8, torch.quint4x2):
        for heads in HEADS:
            for name, features in FEATURES.items():
                requests = Requests(Shape(torch.bfloat16, *heads, 16, kv_dtype), [700, 33, 128])
                outs = requests.run([(0, 0, 599), (1, 0, 32), (2, 0, 128)], 0.2, features)
                outs += requests.run([(0, 599, 1), (1, 32, 1)], 0.2, features)
                outs += requests.run([(0, 600, 100)], 0.2, features)
                numbers = torch.cat(outs).view(torch.int16).numpy()
                print(kv_dtype, heads, name, hashlib.sha256(numbers.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
