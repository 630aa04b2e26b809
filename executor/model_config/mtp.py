"""Multi-token prediction layers of checkpoints (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2).

A layer proposes the token after the next one. It is a decoder layer of the model's own kind, and has its own norms and
projection. Embedding and output layer are the model's; copies of them in a checkpoint are not read. A layer's config is the
model's config with one more key, `SERVED`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec

ARCHITECTURE = "MultiTokenPredictor"
SERVED = "served_architecture"
"""Key of a config: the architecture of the model."""
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Tensors of a layer that repeat the model's."""


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Tensor names of a checkpoint's first prediction layer, without ``.weight``; the defaults are DeepSeek's."""

    layer: str = "model.layers.{num_layers}"
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
    first_kind: bool = False
    """The layer is as the model's first one; otherwise as its last one with attention."""

    def of(self, num_layers: int) -> MtpNames:
        """Return complete names for a model with this number of layers."""
        layer = self.layer.format(num_layers=num_layers)
        parts = {
            each: name.format(layer=layer)
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


_QWEN = MtpNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
MTP_NAMES: dict[str, MtpNames] = {
    "DeepseekV3ForCausalLM": MtpNames(),
    "Glm4MoeForCausalLM": MtpNames(),
    "Glm4MoeLiteForCausalLM": MtpNames(),
    "BailingMoeV2ForCausalLM": MtpNames(output_norm="{layer}.final_layernorm"),
    "MiMoForCausalLM": MtpNames(
        *("model.mtp_layers.0", "{layer}.token_layernorm", "{layer}.hidden_layernorm", "{layer}.input_proj"),
        output_norm="{layer}.final_layernorm",
        hidden_first=True,
    ),
    "Ernie4_5_MoeForCausalLM": MtpNames(
        *("model.mtp_block.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0"),
        output_norm=None,
        first_kind=True,
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
"""Supported architectures."""


@dataclass(frozen=True, slots=True)
class MtpSpec(DecoderSpec):
    """A prediction layer, or an EAGLE head (`quintet.executor.model_config.eagle`)."""

    parts: MtpNames = MtpNames()
    """Names of its parts."""
    projection_bias: bool = False
    aux_layers: tuple[int, ...] = ()
    """The model's last layer, as a number of layers: the hidden states after it are read."""

    has_embedding = False

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the layer can propose."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of the served model."""
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """See `ModelSpec`: without embedding and output layer."""
        (layer,), hidden = self.layers, self.hidden_size
        blocks = [block for block in (layer.mixer, layer.mlp) if block is not None]
        return sum(block.num_parameters(hidden) for block in blocks) + 2 * hidden * hidden


def read_mtp(hf_config: HfConfig) -> MtpSpec:
    """Return the spec of a model's first prediction layer. Raises `ConfigError`."""
    architecture = hf_config.word(SERVED, tuple(MTP_NAMES), "")
    spec = FAMILIES[architecture].read(hf_config)
    assert isinstance(spec, DecoderSpec), architecture
    parts = MTP_NAMES[architecture].of(len(spec.layers))
    like = (
        spec.layers[:1] if parts.first_kind else [each for each in spec.layers if each.attention is not None]
    )
    values = {field.name: getattr(spec, field.name) for field in fields(DecoderSpec)}
    names = replace(spec.names, layer=parts.layer)
    changed = {"layers": (like[-1],), "names": names}
    return MtpSpec(**(values | changed), parts=parts, aux_layers=(len(spec.layers),))
