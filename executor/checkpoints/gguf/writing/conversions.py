"""Conversions of tensors before they are named: splitting and stacking parts, factors, row orders.

By architecture, a folder's tensor becomes tensors of the file. Each has a name known to the `gguf` package or a file
name (``blk.0…``), and a conversion. The conventions are those of llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch

from quintet.executor.checkpoints.gguf.writing.hf_config import Config, head_dim, kv_heads_of

Arrange = Callable[[torch.Tensor], torch.Tensor]
Named = tuple[str, Arrange]
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.*)")
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_OFFSET = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures with the offset added to all of the file's norms; those of `_DELTA` except norms of recurrent mixers."""


def converted(name: str, config: Config, arch: str) -> Iterator[Named]:
    """Yield the file's tensors made from a folder's tensor."""
    found, convert = _LAYER.fullmatch(name), CONVERT.get(arch)
    if found is not None and found[2].endswith(_CORRECTIONS):
        yield f"blk.{found[1]}.exp_probs_b.bias", lambda tensor: tensor.reshape(-1)
    elif found is not None and convert is not None:
        yield from convert(f"blk.{found[1]}", found[2], name, config)
    else:
        yield name, _alone(name, config, arch)


def _alone(name: str, config: Config, arch: str) -> Arrange:
    """Return the conversion of a tensor that stays one: outside layers, or of an architecture without a `CONVERT`."""
    if (arch in _OFFSET and name.endswith("norm.weight")) or (arch in _DELTA and name == "model.norm.weight"):
        return _offset
    if ".query_key_value." in name and arch not in ("bailingmoe", "bailingmoe2", "chatglm"):
        return partial(_ungrouped, config)
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return torch.t
    if arch == "falcon-h1" and name == "lm_head.weight":
        return partial(_times, config["lm_head_multiplier"])
    if arch == "falcon-h1" and name == "model.embed_tokens.weight":
        return partial(_times, config["embedding_multiplier"])
    return as_it_is


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged."""
    return tensor


def paired(heads: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return rows of queries or keys with rotary pairs adjacent instead of half a head apart."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() + 1.0


def _times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() * factor


def _ungrouped(config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Return all queries, then all keys, then all values, from rows grouped by KV head."""
    heads, kv_heads = config["num_attention_heads"], kv_heads_of(config)
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, head_dim(config), *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _squeezed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(1) if tensor.dim() == 3 else tensor


def _fading(tensor: torch.Tensor) -> torch.Tensor:
    """Return the decay rate of a state from its logarithm."""
    return -torch.exp(tensor.float())


def _half(which: int, dim: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(2, dim)[which]


def _rotated(leaf: str, config: Config) -> Arrange:
    if ".q_proj." in leaf:
        return partial(paired, config["num_attention_heads"])
    dim = head_dim(config)  # layers of Nemotron-NAS differ in KV heads
    return (lambda tensor: paired(len(tensor) // dim, tensor)) if ".k_proj." in leaf else as_it_is


def _of_pairs(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    yield name, _rotated(leaf, config)


def _split_qkv(block: str, leaf: str, config: Config) -> Iterator[Named]:
    """Split queries, keys and values out of a fused tensor."""
    dim, heads, kv_heads = head_dim(config), config["num_attention_heads"], kv_heads_of(config)
    q, k = heads * dim, kv_heads * dim
    yield f"{block}.attn_q.{leaf}", lambda tensor: paired(heads, tensor[:q])
    yield f"{block}.attn_k.{leaf}", lambda tensor: paired(kv_heads, tensor[q : q + k])
    yield f"{block}.attn_v.{leaf}", lambda tensor: tensor[q + k :]


def _baichuan(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    if "W_pack" in leaf:
        yield from _split_qkv(block, "weight", config)
    else:
        yield name, as_it_is


def _bailing(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    if "query_key_value" in leaf:
        yield from _split_qkv(block, leaf.rpartition(".")[2], config)
    elif leaf == "attention.dense.weight":
        yield f"{block}.attn_output.weight", as_it_is
    else:
        yield name, as_it_is


def _internlm2(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """Split rows that are grouped by KV head."""
    if "wqkv" not in leaf:
        yield name, as_it_is
        return
    heads, kv_heads, dim = config["num_attention_heads"], kv_heads_of(config), head_dim(config)
    each = heads // kv_heads

    def part(begin: int, end: int, count: int, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(kv_heads, each + 2, dim, -1)[:, begin:end].reshape(-1, tensor.shape[-1])
        return paired(count, rows) if count else rows

    yield f"{block}.attn_q.weight", partial(part, 0, each, heads)
    yield f"{block}.attn_k.weight", partial(part, each, each + 1, kv_heads)
    yield f"{block}.attn_v.weight", partial(part, each + 1, each + 2, 0)


def _latent(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """Split DeepSeek V2's KV up-projection into two tensors; the one of keys is transposed."""
    if not leaf.endswith("kv_b_proj.weight"):
        yield name, as_it_is
        return
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(heads, -1, tensor.shape[-1])

    yield f"{block}.attn_k_b.weight", lambda tensor: rows(tensor)[:, :plain].transpose(1, 2)
    yield f"{block}.attn_v_b.weight", lambda tensor: rows(tensor)[:, plain:]


def _gates_and_ups(block: str, ending: str, dim: int) -> Iterator[Named]:
    yield f"{block}.ffn_gate{ending}.weight", partial(_half, 0, dim)
    yield f"{block}.ffn_up{ending}.weight", partial(_half, 1, dim)


def _granite(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """Split gates and ups; without experts the shared feed-forward is the only one."""
    shared = "_shexp" if config.get("num_local_experts") else ""
    match leaf:
        case "block_sparse_moe.input_linear.weight":
            yield from _gates_and_ups(block, "_exps", 1)
        case "shared_mlp.input_linear.weight":
            yield from _gates_and_ups(block, shared, 0)
        case "shared_mlp.output_linear.weight":
            yield f"{block}.ffn_down{shared}.weight", as_it_is
        case _ if leaf.startswith("mamba."):
            yield name, _of_mamba2(leaf, config["mamba_n_groups"])
        case _:
            yield name, _rotated(leaf, config)


def _of_mamba2(leaf: str, groups: int) -> Arrange:
    """Return the conversion of Mamba 2 tensors: a column for each head value; no dimensions of size 1."""
    if leaf.endswith("A_log"):
        return lambda tensor: _fading(tensor).reshape(-1, 1)
    if leaf.endswith(".D"):
        return lambda tensor: tensor.reshape(-1, 1)
    if leaf.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return lambda tensor: tensor.reshape(groups, -1)
    return _squeezed


def _of_grouped_states(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    yield name, _of_mamba2(leaf, config["n_groups"])


def _of_states(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    yield name, _fading if leaf.endswith("A_log") else _squeezed


def _falcon_h1(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """Fold factors into the matrices."""
    gate, down = config["mlp_multipliers"]
    inner, outer = config["attention_in_multiplier"], config["attention_out_multiplier"]
    factors = {
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
        "self_attn.q_proj.weight": inner,
        "self_attn.k_proj.weight": inner * config["key_multiplier"],
        "self_attn.v_proj.weight": inner,
        "self_attn.o_proj.weight": outer,
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
    }
    if leaf in factors:
        yield name, partial(_times, factors[leaf])
    elif leaf == "mamba.in_proj.weight":
        yield name, partial(_projected_in, config)
    else:
        yield name, _of_mamba2(leaf, config["mamba_n_groups"])


def _projected_in(config: Config, tensor: torch.Tensor) -> torch.Tensor:
    channels, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (channels, channels, states, states, config["mamba_n_heads"])
    pairs = zip(config["ssm_multipliers"], sizes, strict=True)
    rows = torch.cat([torch.full((size, 1), factor) for factor, size in pairs]).to(tensor.device)
    return _times(config["ssm_in_multiplier"], tensor) * rows


def _gpt_oss(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """De-interleave gates and ups; transpose matrices."""
    kinds = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}
    found = kinds.get(leaf.removesuffix("_bias"))
    if found is None:
        yield f"{name}.weight" if leaf.endswith("sinks") else name, as_it_is
        return
    is_bias = leaf.endswith("_bias")

    def taken(which: int, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor[..., which :: len(found)]
        return rows if is_bias else rows.transpose(1, 2)

    for which, kind in enumerate(found):
        yield f"{block}.ffn_{kind}_exps.{'bias' if is_bias else 'weight'}", partial(taken, which)


def _llama4(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    if leaf == "feed_forward.experts.gate_up_proj":
        for named, half in _gates_and_ups(block, "_exps", 2):
            yield named, lambda tensor, half=half: half(tensor).transpose(1, 2)  # type: ignore[misc]
    elif leaf == "feed_forward.experts.down_proj":
        yield f"{block}.ffn_down_exps.weight", lambda tensor: tensor.transpose(1, 2)
    else:
        yield name, as_it_is


def _delta(block: str, leaf: str, name: str, config: Config) -> Iterator[Named]:
    """Convert Qwen3-Next (all queries, then keys, then values) and Qwen 3.5 (interleaved value heads)."""
    if leaf.endswith("norm.weight") and leaf != "linear_attn.norm.weight":
        yield name, _offset
    elif leaf == "mlp.experts.gate_up_proj":
        yield from _gates_and_ups(block, "_exps", 1)
    elif leaf == "mlp.experts.down_proj":
        yield f"{block}.ffn_down_exps.weight", as_it_is
    elif leaf == "linear_attn.in_proj_qkvz.weight":
        yield f"{block}.attn_qkv.weight", partial(_by_kind, config, 0, 3)
        yield f"{block}.attn_gate.weight", partial(_by_kind, config, 3, 4)
    elif leaf.startswith("linear_attn."):
        moved = partial(_in_turns, leaf, config) if "qwen3_5" in config["model_type"] else as_it_is
        first = _fading if leaf.endswith("A_log") else _squeezed
        yield name, lambda tensor: moved(first(tensor))
    else:
        yield name, as_it_is


def _by_kind(config: Config, begin: int, end: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return rows of some kinds (queries, keys, values, gates), concatenated, from rows grouped by key head."""
    key_heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    parts = tensor.reshape(key_heads, -1, tensor.shape[-1]).split([keys, keys, each, each], 1)
    return torch.cat([part.reshape(-1, tensor.shape[-1]) for part in parts[begin:end]])


def _in_turns(leaf: str, config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with value heads interleaved over the key heads: the first of each, then the second, and so on."""
    key_heads, wide = config["linear_num_key_heads"], config["linear_value_head_dim"]

    def moved(rows: torch.Tensor, width: int) -> torch.Tensor:
        return rows.reshape(key_heads, -1, width, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    keys = 2 * key_heads * config["linear_key_head_dim"]
    match leaf.removeprefix("linear_attn."):
        case "in_proj_qkv.weight" | "conv1d.weight":
            return torch.cat([tensor[:keys], moved(tensor[keys:], wide)])
        case "in_proj_z.weight":
            return moved(tensor, wide)
        case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
            return moved(tensor, 1)
        case "out_proj.weight":
            return moved(tensor.t(), wide).t()
    return tensor


CONVERT: dict[str, Callable[[str, str, str, Config], Iterator[Named]]] = {
    **dict.fromkeys(("arcee", "deci", "deepseek", "granite", "llama"), _of_pairs),
    **dict.fromkeys(("minicpm", "mistral3", "olmo", "smollm3", "xverse"), _of_pairs),
    **dict.fromkeys(("jamba", "lfm2", "lfm2moe", "mamba"), _of_states),
    **dict.fromkeys(("mamba2", "nemotron_h"), _of_grouped_states),
    **dict.fromkeys(("granitehybrid", "granitemoe"), _granite),
    **dict.fromkeys(_DELTA, _delta),
    "baichuan": _baichuan,
    "bailingmoe": _bailing,
    "deepseek2": _latent,
    "falcon-h1": _falcon_h1,
    "gpt-oss": _gpt_oss,
    "internlm2": _internlm2,
    "llama4": _llama4,
}
"""Keyed by architecture."""
