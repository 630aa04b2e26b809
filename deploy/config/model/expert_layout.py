"""Layout of experts in a checkpoint: a tensor for each expert, or one tensor of all experts.

transformers 5 keeps experts stacked. Its checkpoints have either layout: Qwen 3.5 MoE is published stacked, and copies of it
have a tensor for each expert.
"""

from __future__ import annotations

from pathlib import Path

from quintet.deploy.config.model.output_layer import read_entries
from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.names import spellings
from quintet.executor.model_config.shape import STACKED_EXPERTS
from quintet.executor.model_config.spec import DecoderSpec, ModelSpec
from quintet.wire.model_files import Json, is_gguf


def has_stacked_experts(folder: Path, spec: ModelSpec) -> bool:
    """Return whether a checkpoint has stacked experts, although the spec has a tensor for each expert.

    Reads headers up to the first layer with experts. False for GGUF files and pickled files. Raises `ConfigError`.
    """
    if not isinstance(spec, DecoderSpec) or is_gguf(folder):
        return False
    layer = next((index for index, each in enumerate(spec.layers) if _is_separate(each.mlp)), None)
    if layer is None:
        return False
    names = spec.names
    stacked = spellings(names.in_layer(layer, names.experts_gate_up), names.prefix)
    first = names.in_layer(layer, names.expert_gate.format(expert=0))
    separate = tuple(f"{each}." for each in spellings(first, names.prefix))
    for path in checkpoint_files(folder):
        entries = {} if path.suffix in PICKLED else read_entries(path)
        if any(name in entries for name in stacked):
            return True
        if any(name.startswith(separate) for name in entries):
            return False
    return False


def _is_separate(mlp: object) -> bool:
    return isinstance(mlp, ExpertsSpec) and mlp.layout is ExpertsLayout.SEPARATE


def with_expert_layout(config: Json, *, is_stacked: bool) -> Json:
    """Return a config that states the layout, for the language model too if it is a part."""
    text = config.get("text_config")
    part = {"text_config": {**text, STACKED_EXPERTS: is_stacked}} if isinstance(text, dict) else {}
    return {**config, STACKED_EXPERTS: is_stacked, **part}
