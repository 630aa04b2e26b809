"""Count the bytes of a GGUF file that one token reads."""

from __future__ import annotations

from pathlib import Path

import gguf


def token_bytes(path: Path) -> int:
    """Return the bytes of the weights that a token reads.

    Only the chosen experts count. The embedding counts only if it is also the output layer.
    """
    reader = gguf.GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    chosen, experts = (reader.fields.get(f"{arch}.{key}") for key in ("expert_used_count", "expert_count"))
    share = chosen.contents() / experts.contents() if chosen and experts else 1.0
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    total = 0
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            total += int(share * int(tensor.n_bytes))
        elif tensor.name != "token_embd.weight" or is_tied:
            total += int(tensor.n_bytes)
    return total
