"""Multi-token prediction layers of checkpoints (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2).

A layer proposes the token after the next one. It is a decoder layer of the model's own kind, and has its own norms and
projection. A second layer proposes the token after that, and so on. Embedding and output layer are the model's; copies of them in
a checkpoint are not read. The layers' config is the model's config with more keys, `SERVED` and `NUM_LAYERS`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.shape import FULL, MAX_LAYERS, PREDICTORS
from quintet.executor.model_config.spec import DecoderSpec

ARCHITECTURE = "MultiTokenPredictor"
SERVED = "served_architecture"
"""Key of a config: the architecture of the model."""
NUM_LAYERS = "num_prediction_layers"
"""Key of a config: the number of layers to read."""
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Tensors of a layer that repeat the model's."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Tensor names of a checkpoint's prediction layers, without ``.weight``; the defaults are DeepSeek's.

    ``{index}`` stands for the index of a prediction layer, ``{number}`` for its number after the model's layers.
    """

    layer: str = "model.layers.{number}"
    """Prefix of the decoder layer; the names in it are those of the model's layers."""
    token_norm: str | None = "{layer}.enorm"
    hidden_norm: str | None = "{layer}.hnorm"
    """None: there is no such norm."""
    projection: str = "{layer}.eh_proj"
    """Of the joined embedding and hidden state, each normed."""
    output_norm: str | None = "{layer}.shared_head.norm"
    """Norm before the output layer; None: the model's own."""
    has_output_norm: bool = True
    hidden_first: bool = False
    """The hidden state is before the embedding in the projection's input."""
    is_dense: bool = False
    """The layer has the feed-forward of the model's first one; otherwise that of the last one with attention."""

    def of(self, index: int, num_layers: int) -> MtpNames:
        """Return complete names of a prediction layer. num_layers: of the model."""
        layer = self.layer.format(index=index, number=num_layers + index)
        parts = {
            each: name.format(layer=layer, index=index)
            for each in ("token_norm", "hidden_norm", "projection", "output_norm")
            if (name := getattr(self, each)) is not None
        }
        return replace(self, layer=layer, **parts)

    def has(self, tensor: str) -> bool:
        """Return whether the layer reads a tensor. The name may lack ``model.``."""
        parts = [
            name for name in (self.token_norm, self.hidden_norm, self.projection, self.output_norm) if name
        ]
        for prefix in (f"{each}." for each in (*parts, self.layer)):
            for spelling in (prefix, prefix.removeprefix("model.")):
                if tensor.startswith(spelling):
                    return not tensor[len(spelling) :].startswith(_COPIES)
        return False


_QWEN = MtpNames(
    "mtp.layers.{index}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)
MTP_NAMES: dict[str, MtpNames] = {
    "DeepseekV3ForCausalLM": MtpNames(),
    "Glm4MoeForCausalLM": MtpNames(),
    "Glm4MoeLiteForCausalLM": MtpNames(),
    "BailingMoeV2ForCausalLM": MtpNames(output_norm="{layer}.final_layernorm"),
    "MiMoForCausalLM": MtpNames(
        *(
            "model.mtp_layers.{index}",
            "{layer}.token_layernorm",
            "{layer}.hidden_layernorm",
            "{layer}.input_proj",
        ),
        output_norm="{layer}.final_layernorm",
        hidden_first=True,
    ),
    "Ernie4_5_MoeForCausalLM": MtpNames(
        *("model.mtp_block.{index}", "model.mtp_emb_norm.{index}", "model.mtp_hidden_norm.{index}"),
        *("model.mtp_linear_proj.{index}",),
        output_norm=None,
        is_dense=True,
    ),
    "ExaoneMoeForCausalLM": replace(_QWEN, is_dense=True),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
"""Supported architectures."""


@dataclass(frozen=True, slots=True)
class MtpSpec(DecoderSpec):
    """Prediction layers, or an EAGLE head (`quintet.executor.model_config.draft_heads`)."""

    parts: tuple[MtpNames, ...] = ()
    """Names of each layer's parts."""
    projection_bias: bool = False
    aux_layers: tuple[int, ...] = ()
    """The model's last layer, as a number of layers: the hidden states after it are read."""

    has_embedding = False

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the layers can propose."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the served model."""
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """See `ModelSpec`: without embedding and output layer."""
        hidden = self.hidden_size
        return sum(layer.num_parameters(hidden) + 2 * hidden * hidden for layer in self.layers)

    def has(self, tensor: str) -> bool:
        """Return whether a layer reads a tensor. The name may lack ``model.``."""
        return any(each.has(tensor) for each in self.parts)

    def num_found(self, tensors: Collection[str], most: int) -> int:
        """Return the number of first layers with tensors, at most ``most``. Names may lack ``model.``."""
        layers = [(f"{each.layer}.", f"{each.layer.removeprefix('model.')}.") for each in self.parts[:most]]
        found = [any(name.startswith(layer) for name in tensors) for layer in layers]
        return [*found, False].index(False)


def read_mtp(hf_config: HfConfig) -> MtpSpec:
    """Return the spec of a model's prediction layers. Raises `ConfigError`."""
    architecture = hf_config.word(SERVED, tuple(MTP_NAMES), "")
    spec = FAMILIES[architecture].read(hf_config)
    assert isinstance(spec, DecoderSpec), architecture
    known = MTP_NAMES[architecture]
    count = hf_config.whole((NUM_LAYERS, *PREDICTORS), 0, MAX_LAYERS, 1) or 1
    parts = tuple(known.of(index, len(spec.layers)) for index in range(count))
    kinds = hf_config.values.get("mtp_layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(each != FULL for each in kinds)):
        raise hf_config.wrong("mtp_layer_types", f"a list of {FULL}")
    layer = [each for each in spec.layers if each.attention is not None][-1]
    if known.is_dense:
        layer = replace(layer, mlp=spec.layers[0].mlp)
    values = {field.name: getattr(spec, field.name) for field in fields(DecoderSpec)}
    names = replace(spec.names, layer=parts[0].layer)
    changed = {"layers": count * (layer,), "names": names}
    return MtpSpec(**(values | changed), parts=parts, aux_layers=(len(spec.layers),))
