"""EAGLE-3 heads as draft models: their files, memory, and the checks that they fit the served model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.card import ModelFacts
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.weights import loaded_quantization, read_weight_facts, weight_bytes_of
from quintet.deploy.config.speculation import FLAG
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.eagle import (
    ARCHITECTURE,
    AUX_LAYERS,
    NUM_FEATURES,
    EagleSpec,
    default_aux_layers,
    eagle_card,
    read_eagle,
)
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec
from quintet.wire.config import DTYPE_BYTES, DraftModelConfig, Dtype, ModelConfig, Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec, full_layers
from quintet.wire.model_files import parse_json, read_json

_DECODER = "quintet.executor.models.decoder:Decoder"


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A head that fits the served model."""

    name: str
    path: Path
    card: str
    spec: EagleSpec
    dtype: Dtype
    quantization: Quantization
    weight_bytes: int
    kv: KvSpec
    group: int
    """See `DraftModelConfig.group`."""

    @property
    def block_bytes(self) -> int:
        """Memory for each block of the served model's KV memory: keys and values, and features of its last token."""
        return self.kv.bytes_per_block + self.spec.hidden_size * DTYPE_BYTES[self.dtype]

    def of(self, model: ModelConfig) -> DraftModelConfig:
        """Return the configuration of the head of a served model."""
        return DraftModelConfig(
            model=ModelConfig(
                path=str(self.path),
                tokenizer_path=model.tokenizer_path,
                served_names=[self.name],
                architecture=ARCHITECTURE,
                card=self.card,
                dtype=self.dtype,
                vocab_size=self.spec.draft_vocab_size,
                max_model_len=model.max_model_len,
                eos_token_ids=model.eos_token_ids,
                kv=self.kv,
            ),
            group=self.group,
            quantization=self.quantization,
            weight_bytes=self.weight_bytes,
            aux_layers=list(self.spec.aux_layers),
        )


def read_head(
    name: str, options: Options, target: ModelFacts, dtype: Dtype, block_size: int, group: int
) -> HeadFacts:
    """Return the head of a served model ``target``; ``dtype`` is that of both. Raises `ConfigError`."""
    reads_weights = options.load_format == "auto"
    folder = locate_model(name, reads_weights, flag=f"{FLAG}: model")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{FLAG}: head {name!r} has no config.json: give the folder of an EAGLE-3 head")
    weights = read_weight_facts(folder) if reads_weights else None
    if weights is not None and not weights.contents:
        raise ConfigError(
            f"{FLAG}: head {name!r} has pickled weights: convert them with `quintet convert`, and give the new folder"
        )
    served = _served_spec(target)
    card = eagle_card(read_json(path), () if weights is None else weights.contents)
    spec = read_eagle(ModelCard(card, str(path)))
    if not spec.aux_layers:
        card[AUX_LAYERS] = list(default_aux_layers(len(served.layers)))
        spec = read_eagle(ModelCard(card, str(path)))
    _check_fit(name, spec, served, str(target.path))
    (layer,), item_bytes = spec.layers, DTYPE_BYTES[dtype]
    assert isinstance(layer.mixer, AttentionSpec), layer
    kv = full_layers(1, layer.mixer.num_kv_heads, layer.mixer.head_dim, item_bytes, block_size)
    quantization = loaded_quantization(options)
    num_parameters = (weights and weights.num_parameters) or spec.num_parameters
    weight_bytes = weight_bytes_of(num_parameters, item_bytes, quantization, None, weights, 0)
    weight_bytes += options.max_num_seqs * NUM_FEATURES * spec.hidden_size * item_bytes
    return HeadFacts(*(name, folder, json.dumps(card), spec, dtype, quantization, weight_bytes, kv, group))


def _served_spec(target: ModelFacts) -> DecoderSpec:
    family = FAMILIES.get(target.architecture)
    spec = None
    if target.implementation == "quintet" and family is not None and family.builder == _DECODER:
        spec = family.read(ModelCard(parse_json(target.card, target.path), str(target.path)))
    if not isinstance(spec, DecoderSpec):
        raise ConfigError(f"{FLAG}: the method eagle3 is not supported for {target.architecture}: use ngram")
    return spec


def _check_fit(name: str, spec: EagleSpec, served: DecoderSpec, path: str) -> None:
    """Reject a head of another model."""
    checks = [
        ("hidden size", spec.target_hidden_size, served.hidden_size),
        ("vocabulary size", spec.vocab_size, served.vocab_size),
        ("number of layers at least", max(spec.aux_layers, default=0), len(served.layers)),
    ]
    if not spec.has_embedding:
        checks.append(("embedding width", spec.hidden_size, served.embedding_width or served.hidden_size))
    for what, needed, found in checks:
        if needed > found if what.endswith("least") else needed != found:
            raise ConfigError(
                f"{FLAG}: head {name!r} is for a model with {what} {needed}, but {path} has {found}: use a head that was trained"
                " for the served model"
            )
