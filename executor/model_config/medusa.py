"""Medusa heads (Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads", 2024).

Head ``i`` reads the hidden state of a token, and proposes the token ``i + 2`` places after it. Many configurations lack
sizes, or have another number of heads than the checkpoint. So `medusa_hf_config` takes all sizes from the tensors, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.shape import HIDDEN, LAYERS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, VOCAB
from quintet.wire.config import MAX_DRAFTS

ARCHITECTURE = "MedusaHeads"
AUX_LAYER = "served_layers"
_PREFIXES = ("medusa_head.", "medusa_heads.")
"""Optional prefixes of all tensors."""
_FORMAT, _PREFIX, _BIASED = "names", "prefix", "biased"
"""Keys of the converted config: format and prefix of the names, and whether residual layers have biases."""
_HEADS, _DEPTH = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", *LAYERS)


@dataclass(frozen=True, slots=True)
class MedusaNames:
    """Tensor names without ``.weight``."""

    layer: str
    output: str

    def of_layer(self, head: int, layer: int) -> str:
        """Return the name of a residual layer."""
        return self.layer.format(head=head, layer=layer)

    def of_output(self, head: int, num_layers: int) -> str:
        """Return the name of a head's output layer."""
        return self.output.format(head=head, layer=num_layers)


NAMES = {
    "authors": MedusaNames("{head}.{layer}.linear", "{head}.{layer}"),
    "vllm": MedusaNames("blocks.{head}.layers.{layer}", "lm_heads.{head}"),
}
"""By format."""


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """The heads of a served model. Implements `quintet.executor.model_config.spec.ModelSpec`."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    """Residual layers of a head."""
    biased: bool
    names: MedusaNames
    prefix: str
    """Optional prefix of the names."""
    aux_layers: tuple[int, ...]
    """The model's last layer, as a number of layers: the hidden states after it are read."""

    kv_needs = ()
    state_needs = ()
    fixed_rope_len = None
    reach = 1 << 24
    has_embedding = True

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that a head can propose."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the served model."""
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """See `ModelSpec`."""
        return self.num_heads * self.hidden_size * (self.num_layers * self.hidden_size + self.vocab_size)

    def has(self, tensor: str) -> bool:
        """Return whether the heads read a tensor."""
        name = tensor.removeprefix(self.prefix).removesuffix(".weight").removesuffix(".bias")
        return any(
            name == self.names.of_output(head, self.num_layers)
            or any(name == self.names.of_layer(head, layer) for layer in range(self.num_layers))
            for head in range(self.num_heads)
        )


def medusa_hf_config(
    config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], num_layers: int
) -> dict[str, Any]:
    """Return the config of heads. tensors: shapes in the checkpoint; empty for dummy weights. num_layers: of the served model."""
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in tensors)), "")
    shapes = {name.removeprefix(prefix): shape for name, shape in tensors.items()}
    form = "vllm" if any(name.startswith("blocks.") for name in shapes) else "authors"
    names = NAMES[form]
    depth = _num_present(shapes, lambda layer: names.of_layer(0, layer))
    num_heads = _num_present(shapes, lambda head: names.of_output(head, depth))
    output, known = shapes.get(f"{names.of_output(0, depth)}.weight", ()), dict[str, Any]()
    if len(output) == 2:
        known = {VOCAB[0]: output[0], HIDDEN[0]: output[1], _HEADS[0]: num_heads, _DEPTH[0]: depth}
    return {
        **{key: value for key, value in config.items() if value is not None},
        **known,
        "architectures": [ARCHITECTURE],
        AUX_LAYER: num_layers,
        _FORMAT: form,
        _PREFIX: prefix,
        _BIASED: f"{names.of_layer(0, 0)}.bias" in shapes,
    }


def read_medusa(hf_config: HfConfig) -> MedusaSpec:
    """Return the spec of a config that `medusa_hf_config` converted. Raises `ConfigError`."""
    if hf_config.flag("original_lm_head", False):
        raise hf_config.wrong("original_lm_head", "false: each head needs its own output layer")
    vocab_size = hf_config.whole(VOCAB, 1, MAX_VOCAB)
    if hf_config.values.get("truncated_vocab_size") not in (None, vocab_size):
        raise hf_config.wrong("truncated_vocab_size", "equal to vocab_size")
    return MedusaSpec(
        vocab_size=vocab_size,
        hidden_size=hf_config.whole(HIDDEN, 1, MAX_WIDTH),
        num_heads=hf_config.whole(_HEADS, 1, MAX_DRAFTS),
        num_layers=hf_config.whole(_DEPTH, 0, MAX_LAYERS, 1),
        biased=hf_config.flag(_BIASED, False),
        names=NAMES[hf_config.word(_FORMAT, tuple(NAMES), "authors")],
        prefix=hf_config.word(_PREFIX, ("", *_PREFIXES), ""),
        aux_layers=(hf_config.whole(AUX_LAYER, 0, MAX_LAYERS),),
    )


def _num_present(tensors: Collection[str], name_of: Callable[[int], str]) -> int:
    """Return the number of layers or heads, counted from 0, with weights."""
    return sum(1 for _ in takewhile(lambda index: f"{name_of(index)}.weight" in tensors, count()))
