"""Tensors of a GGUF file, and their conversion from a model folder's tensors.

Tensor names come from the `gguf` package. This module makes the others: reordered queries and keys for interleaved
RoPE, norms with their offset, stacked experts. Pure row operations also apply to rows in blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gguf
import torch

from quintet.executor.checkpoints.gguf.writing.conversions import Arrange, converted
from quintet.executor.checkpoints.gguf.writing.hf_config import Config, head_dim, rope_of
from quintet.executor.model_config import registry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.mtp import MTP_NAMES, SERVED, MtpNames, read_mtp
from quintet.executor.model_config.spec import DecoderSpec

Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]

_ALIKE = (
    *("apertus", "arcee", "baichuan", "bloom", "cohere2", "dots1", "ernie4_5", "exaone4", "falcon", "gemma"),
    *("gemma2", "glm4", "gpt2", "granite", "granitemoe", "internlm2", "jais2", "jamba", "lfm2", "llama"),
    *("mamba", "mamba2", "minicpm3", "mpt", "nemotron", "nemotron_h", "olmo", "olmo2", "olmoe", "phi3"),
    *("phimoe", "qwen", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""Values of ``model_type`` that are also the GGUF architecture."""
ARCHITECTURES = {
    **{name: name for name in _ALIKE},
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "cohere": "command-r",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "olmo3": "olmo2",
    "phi": "phi2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "youtu": "deepseek2",
}
"""Keyed by the config's model_type."""
_OF_HF_CONFIGS = {
    "BailingMoeForCausalLM": "bailingmoe",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "ChatGLMModel": "chatglm",
    "DeciLMForCausalLM": "deci",
    "DeepseekForCausalLM": "deepseek",
    "ExaoneForCausalLM": "exaone",
    "MiniCPMForCausalLM": "minicpm",
    "OrionForCausalLM": "orion",
    "XverseForCausalLM": "xverse",
}
"""Keyed by the config's architecture, for families with an unusual or shared model_type."""
_KINDS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
"""Names of an expert's matrices in checkpoints."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)\.weight")
_HEAD_NORM = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.weight")
_BUFFERS = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
"""Suffixes of computable buffers that older versions of transformers saved."""
CURVES = (".act_fn.alpha_p", ".act_fn.alpha_n", ".act_fn.beta", ".act_fn.eps")
"""Suffixes of tensors that become metadata: Apertus' activations."""


class HasNoPlace(Exception):
    """Unknown tensor of the folder, by name."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the file."""

    name: str
    sources: tuple[str, ...]
    """Tensors of the folder."""
    make: Make
    """Converts the sources to the tensor: rows in another order, or values in fp32."""


def architecture_of(config: Config) -> str | None:
    """Return the GGUF architecture of a config; None if it is not supported for writing."""
    names = config.get("architectures") or [None]
    return _OF_HF_CONFIGS.get(names[0]) or ARCHITECTURES.get(str(config.get("model_type")))


def model_type_of(architecture: str) -> str | None:
    """Return the ``model_type`` of configs with this architecture; None if it is not supported for writing."""
    return next(
        (kind for kind in ARCHITECTURES if registry.architecture_of(kind, is_part=False) == architecture),
        None,
    )


def read_tensors(
    config: HfConfig, arch: str, sources: Collection[str]
) -> tuple[list[str], tuple[MtpNames, ...]]:
    """Return the tensors of a folder that a model reads, and the names of its multi-token prediction layers.

    Those layers are included if the architecture has tensors for them.
    """
    name = config.values["architectures"][0]
    spec = registry.FAMILIES[name].read(config)
    assert isinstance(spec, DecoderSpec), spec
    read, predictors = set(spec.names.without_ignored(sources)), tuple[MtpNames, ...]()
    if name in MTP_NAMES and gguf.MODEL_TENSOR.NEXTN_EH_PROJ in gguf.MODEL_TENSORS[_arch_of(arch)]:
        mtp = read_mtp(replace(config, values={**config.values, SERVED: name}))
        predictors = mtp.parts[: mtp.num_found(sources, len(mtp.parts))]
        read.update(each for each in sources if _in_predictor(each, predictors, len(spec.layers)))
    return [each for each in sources if each in read], predictors


def _in_predictor(name: str, predictors: Sequence[MtpNames], num_layers: int) -> str | None:
    """Return DeepSeek's name of a tensor of a multi-token prediction layer; None for other tensors."""
    for number, each in enumerate(predictors, num_layers):
        usual = MtpNames().of(number - num_layers, num_layers)
        for part in ("layer", "token_norm", "hidden_norm", "projection", "output_norm"):
            own = getattr(each, part)
            if own is not None and name.startswith(f"{own}."):
                return f"{getattr(usual, part)}{name.removeprefix(own)}"
    return None


def laid_out(
    config: Config, arch: str, sources: Sequence[str], predictors: Sequence[MtpNames]
) -> Iterator[FileTensor]:
    """Yield the file's tensors, in the folder's order. Raises `HasNoPlace`. sources, predictors: see `read_tensors`."""
    num_layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(_arch_of(arch), num_layers + len(predictors))
    yield from _of_rope(config)
    stacks: dict[str, dict[int, str]] = {}
    for source in sources:
        name = _in_predictor(source, predictors, num_layers) or source
        expert, head = _EXPERT.fullmatch(name), _HEAD_NORM.fullmatch(name)
        if expert is not None:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = source
        elif head is not None:
            stacks.setdefault(f"{head[1]}.weight", {})[int(head[2])] = source
        elif not name.endswith((*_BUFFERS, *CURVES)) and not (
            name == "lm_head.weight" and config.get("tie_word_embeddings")
        ):
            for spelled, arrange in converted(name, config, arch):
                yield FileTensor(renamed(names, spelled), (source,), _alone(arrange))
    for name, parts in stacks.items():
        sources_of = tuple(parts[each] for each in sorted(parts))
        yield FileTensor(_of_experts(name) or renamed(names, name), sources_of, _stacked)


def _alone(arrange: Arrange) -> Make:
    return lambda tensors: arrange(tensors[0])


def _of_experts(name: str) -> str | None:
    """Return the file's name of a matrix of all experts."""
    found = re.search(r"\.(\d+)\..*experts\.(\w+)\.weight", name)
    return None if found is None else f"blk.{found[1]}.ffn_{_KINDS[found[2]]}_exps.weight"


def renamed(names: Any, name: str) -> str:
    """Return the file's name of a folder's tensor, by the `gguf` package's map. Raises `HasNoPlace`."""
    if name.startswith("blk."):
        return name
    name = name.replace(".dt_bias", ".dt_proj.bias")
    name = name if name.startswith(("model.", "lm_head.", "transformer.")) else f"transformer.{name}"
    for spelled in (name, name.removeprefix("transformer.")):
        found = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return str(found)
    raise HasNoPlace(name)


def _arch_of(name: str) -> Any:
    """Return the `gguf` package's architecture by name."""
    return next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name)


def _of_rope(config: Config) -> Iterator[FileTensor]:
    """Yield the RoPE factors."""
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        yield FileTensor("rope_freqs.weight", (), lambda _: _llama3_factors(config, rope))
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            factors = torch.tensor(rope[f"{which}_factor"], dtype=torch.float32)
            yield FileTensor(f"rope_factors_{which}.weight", (), lambda _, factors=factors: factors)  # type: ignore[misc]


def _llama3_factors(config: Config, rope: Mapping[str, Any]) -> torch.Tensor:
    """Return the divisor of each frequency: 1 for high ones, ``factor`` for low ones, a blend between."""
    dim, theta = head_dim(config), rope.get("rope_theta") or config["rope_theta"]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    wavelengths = 2 * math.pi / frequencies
    keys = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
    original, low, high, factor = (rope[key] for key in keys)
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    factors: torch.Tensor = 1.0 / ((1.0 - share) / factor + share)
    return factors.float()


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors))
