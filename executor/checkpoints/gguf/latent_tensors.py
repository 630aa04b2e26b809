"""Map the tensors of latent attention (DeepSeek V2 and V3, MiniCPM 3) in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.checkpoints.gguf.tensor_map import TensorMap
from quintet.executor.model_config.spec import LatentSpec


def add_latent(found: TensorMap, spec: LatentSpec) -> None:
    """Add the recipes of one layer. Older files have one KV up-projection; newer ones split it into keys and values."""
    names = found.names
    if spec.q_rank is None:
        found.module(names.q, "attn_q")
    else:
        found.module(names.q_a, "attn_q_a")
        found.norm(names.q_a_norm, "attn_q_a_norm", spec.norm)
        found.module(names.q_b, "attn_q_b")
    found.module(names.kv_a, "attn_kv_a_mqa")
    found.norm(names.kv_a_norm, "attn_kv_a_norm", spec.norm)
    found.module(names.output, "attn_output")
    found.module(names.kv_b, "attn_kv_b")
    keys, values = found.rows("attn_k_b.weight"), found.rows("attn_v_b.weight")
    if keys is None or values is None:
        return
    heads, plain, wide, rank = spec.num_heads, spec.plain_dim, spec.head_width, spec.rank

    def by_head(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        of_keys = parts[0].reshape(heads, rank, plain).transpose(1, 2)
        return torch.cat([of_keys, parts[1].reshape(heads, wide, rank)], 1)

    found.add(f"{names.kv_b}.weight", (keys, values), (heads * (plain + wide), rank), by_head)
