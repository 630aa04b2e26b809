"""Draft models and draft heads (EAGLE, Medusa, multi-token prediction): files, memory, and checks that they fit the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.deploy.config import rules
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.checkpoint_layout import has_stacked_experts, with_value
from quintet.deploy.config.model.hf_config import ModelFacts, read_facts
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.deploy.config.model.weights import (
    WeightFacts,
    facts_of,
    loaded_quantization,
    num_parameters_of,
    read_served_facts,
    read_weight_facts,
    weight_bytes_of,
)
from quintet.deploy.config.speculation import FLAG, draft_quantization, speculation, speculative_config
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.model_config import draft_heads, mtp
from quintet.executor.model_config.draft_heads import DRAFT_HEADS, EagleSpec, HeadSpec, MedusaSpec
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.mtp import MTP_NAMES, MtpSpec
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.shape import STACKED_EXPERTS
from quintet.executor.model_config.spec import DecoderSpec, KvNeed
from quintet.wire.config import DTYPE_BYTES, DraftModelConfig, Dtype, ModelConfig, Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import ALIGNMENT, KvGroup, KvSpec
from quintet.wire.model_files import hf_config_path, parse_json, read_json

_DECODER = "quintet.executor.models.decoder:Decoder"
_CONVERTERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "eagle": draft_heads.eagle_hf_config,
    "eagle3": draft_heads.eagle3_hf_config,
    "medusa": draft_heads.medusa_hf_config,
}
"""Method with a head of its own folder -> function that converts the configuration of the head."""


@dataclass(frozen=True, slots=True)
class Head:
    name: str
    path: Path
    architecture: str
    hf_config: str
    spec: HeadSpec
    weights: WeightFacts | None
    """None for dummy weights."""
    quantization: Quantization
    stored: Format | None = None
    """Quantization format of the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """A draft model or head before the served model's context length and vocabulary are known."""

    name: str
    path: Path
    architecture: str
    hf_config: str
    dtype: Dtype
    vocab_size: int
    embedding_width: int = 0
    max_model_len: int | None = None
    """Of a draft model, which has a tokenizer of its own; None for a head."""
    quantization: Quantization
    weight_bytes: int
    kv: KvSpec
    block_bytes: int
    """Memory for each block of the served model's KV memory."""
    group: int
    """See `DraftModelConfig.group`."""
    states: KvSpec | None = None
    """See `DraftModelConfig.states`."""
    aux_layers: tuple[int, ...] = ()
    """See `DraftModelConfig.aux_layers`."""

    def of(self, model: ModelConfig) -> DraftModelConfig:
        """Return the configuration for a served model. Raises `ConfigError` if the tokens of a draft model differ."""
        tokenizer, max_model_len = model.tokenizer_path, model.max_model_len
        if self.max_model_len is not None:
            folder = tokenizer_folder(self.path, advice=f"{FLAG}: a draft model needs its tokenizer")
            _check_tokens(self.name, _tokens_of(folder), _tokens_of(Path(tokenizer)))
            tokenizer, max_model_len = str(folder), min(max_model_len, self.max_model_len)
        return DraftModelConfig(
            model=ModelConfig(
                path=str(self.path),
                tokenizer_path=tokenizer,
                served_names=[self.name],
                architecture=self.architecture,
                hf_config=self.hf_config,
                dtype=self.dtype,
                vocab_size=self.vocab_size,
                embedding_width=self.embedding_width,
                max_model_len=max_model_len,
                eos_token_ids=model.eos_token_ids,
                kv=self.kv,
            ),
            group=self.group,
            quantization=self.quantization,
            weight_bytes=self.weight_bytes,
            aux_layers=list(self.aux_layers),
            states=self.states,
        )


def read_head(
    name: str | None, options: Options, target: ModelFacts, dtype: Dtype, block_size: int, group: int
) -> DraftFacts:
    """Return the head of this name, or without a name the multi-token prediction layer of the served model.

    dtype: of both. Raises `ConfigError`.
    """
    head = _mtp_head(options, target) if name is None else _named_head(name, options, target)
    item_bytes, spec, weights = DTYPE_BYTES[dtype], head.spec, head.weights
    num_parameters = (weights and weights.num_parameters) or spec.num_parameters
    weight_bytes = weight_bytes_of(num_parameters, item_bytes, head.quantization, head.stored, weights, 0)
    if options.tensor_parallel_size * options.pipeline_parallel_size > 1 and isinstance(spec, MtpSpec):
        # Rank 0 of the served model has at most a part of the output layer; the head needs all of it.
        quantization = "none" if head.stored else loaded_quantization(options.quantization)
        num_outputs = spec.vocab_size * spec.hidden_size
        weight_bytes += weight_bytes_of(num_outputs, item_bytes, quantization, None, None, 0)
    kv, block_bytes = _without_kv(block_size), 0
    if spec.kv_needs:
        kv = draft_kv(options, target, spec.kv_needs, block_size, item_bytes)
        # Keys and values, features of all tokens, and those of later layers for the token after the block.
        num_features = block_size + len(spec.kv_needs) - 1
        block_bytes = kv.bytes_per_block + num_features * spec.hidden_size * item_bytes
    else:
        weight_bytes += options.max_num_seqs * spec.hidden_size * item_bytes  # features of the newest tokens
    return DraftFacts(
        name=head.name,
        path=head.path,
        architecture=head.architecture,
        hf_config=head.hf_config,
        dtype=dtype,
        vocab_size=spec.draft_vocab_size,
        quantization=head.quantization,
        weight_bytes=weight_bytes,
        kv=kv,
        block_bytes=block_bytes,
        group=group,
        aux_layers=tuple(spec.aux_layers),
    )


def _without_kv(block_size: int) -> KvSpec:
    """Return the layout of a model without keys and values: one place without layers."""
    return KvSpec([KvGroup("full", [])], 1, ALIGNMENT, block_size)


def draft_kv(
    options: Options, facts: ModelFacts, needs: Sequence[KvNeed | None], block_size: int, dtype_bytes: int
) -> KvSpec:
    """Return a layout of one group. Layers with a window keep all tokens, as the served model's full attention does.

    facts: of the draft model, or of the served one.
    """
    kept = tuple(need and dataclasses.replace(need, window=None, chunk=None) for need in needs)
    alike = dataclasses.replace(options, kv_cache_dtype="model", block_size=block_size)
    return rules.kv_spec(alike, "cpu", dataclasses.replace(facts, kv_needs=kept, state_needs=()), dtype_bytes)


def _named_head(name: str, options: Options, target: ModelFacts) -> Head:
    asked = speculation(options)
    assert asked is not None, "a head is named"
    reads_weights = options.load_format == "auto"
    folder = locate_model(name, reads_weights, flag=f"{FLAG}: model")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{FLAG}: head {name!r} has no config.json: give the folder of a head")
    weights = read_weight_facts(folder) if reads_weights else None
    if weights is not None and not weights.contents:
        raise ConfigError(
            f"{FLAG}: head {name!r} has pickled weights: run `quintet convert {name}`, which adds safetensors"
        )
    served = _served_spec(target, asked.method)
    shapes = {} if weights is None else {key: entry.shape for key, entry in weights.contents.items()}
    hf_config = _CONVERTERS[asked.method](read_json(path), shapes, len(served.layers))
    (architecture,) = hf_config["architectures"]
    spec = DRAFT_HEADS[architecture].read(HfConfig(hf_config, str(path)))
    assert isinstance(spec, HeadSpec), spec
    _check_fit(name, spec, served, str(target.path))
    if not isinstance(spec, EagleSpec) and weights is not None:
        weights = _read_tensors(spec, weights)
    return Head(name, folder, architecture, json.dumps(hf_config), spec, weights, draft_quantization(options))


def _mtp_head(options: Options, target: ModelFacts) -> Head:
    if target.implementation != "quintet" or target.architecture not in MTP_NAMES:
        raise ConfigError(
            f"{FLAG}: the method mtp is not supported for {target.architecture}, only for {', '.join(MTP_NAMES)}: use ngram"
        )
    path = hf_config_path(target.path)
    hf_config = parse_json(target.hf_config, path) | {mtp.SERVED: target.architecture}
    hf_config = with_value(hf_config, STACKED_EXPERTS, False)
    spec = mtp.read_mtp(HfConfig(hf_config, str(path)))
    found = speculative_config(options, "torch", "cpu")
    assert found is not None, "the method is mtp"
    weights, num_layers = None, min(len(spec.parts), found.num_speculative_tokens)
    if options.load_format == "auto":
        if has_stacked_experts(target.path, spec):
            hf_config = with_value(hf_config, STACKED_EXPERTS, True)
        weights = read_weight_facts(target.path, [each.layer for each in spec.parts])
        num_layers = spec.num_found(weights.contents, num_layers)
        if not num_layers:
            raise ConfigError(
                f"{FLAG}: {target.path} has no tensors {spec.parts[0].projection}.* of a multi-token prediction layer: use"
                " safetensors of the whole model, or the method ngram"
            )
    hf_config |= {mtp.NUM_LAYERS: num_layers}
    spec = mtp.read_mtp(HfConfig(hf_config, str(path)))
    quantization = draft_quantization(options) if target.stored is None else target.stored.name
    text = json.dumps(hf_config)
    read = None if weights is None else _read_tensors(spec, weights)
    return Head("mtp", target.path, mtp.ARCHITECTURE, text, spec, read, quantization, target.stored)


def _read_tensors(spec: MtpSpec | MedusaSpec, weights: WeightFacts) -> WeightFacts:
    """Return the sizes of the tensors that a head reads."""
    return facts_of({name: entry for name, entry in weights.contents.items() if spec.has(name)})


def _served_spec(target: ModelFacts, method: str) -> DecoderSpec:
    spec = target.decoder
    if spec is None or FAMILIES[target.architecture].builder != _DECODER:
        raise ConfigError(
            f"{FLAG}: the method {method} is not supported for {target.architecture}: use ngram"
        )
    return spec


def _check_fit(name: str, spec: HeadSpec, served: DecoderSpec, path: str) -> None:
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


def read_draft(
    options: Options, device: str, target: ModelFacts, kv: KvSpec, dtype: Dtype
) -> DraftFacts | None:
    """Return the draft model or head that the flags name, or None. kv, dtype: of the served model ``target``.

    Raises `ConfigError`.
    """
    asked = speculation(options)
    if asked is None or not asked.has_draft_model:
        return None
    name, method = asked.model, asked.method
    group = next((index for index, each in enumerate(kv.groups) if each.kind == "full"), None)
    if method == "medusa":
        group = 0  # unused: the heads have no keys and values
    if name is None or method in _CONVERTERS:
        return read_head(name, options, target, dtype, kv.block_size, _existing(group, target))
    draft = _read_model(name, options, device, target, kv.block_size, group)
    if device != "cpu" and draft.states is not None:
        raise ConfigError(
            f"{FLAG}: draft model {name!r} has recurrent states, which is not supported on a GPU: use another one, or"
            " --device cpu"
        )
    return draft


def _existing(group: int | None, target: ModelFacts) -> int:
    if group is None:
        raise ConfigError(
            f"{FLAG}: {target.path} has no layer with full attention; a draft model or head uses the blocks of such a layer: use"
            " the method ngram"
        )
    return group


def _read_model(
    name: str, options: Options, device: str, target: ModelFacts, block_size: int, group: int | None
) -> DraftFacts:
    reads_weights = options.load_format == "auto"
    facts = read_facts(
        locate_model(name, reads_weights, flag=f"{FLAG}: model"),
        generation_config="none",
        with_weights=reads_weights,
    )
    if facts.implementation != "quintet":
        raise ConfigError(
            f"{FLAG}: draft model {name!r} has the architecture {facts.architecture}, which only transformers computes; use"
            " one that docs/models.md lists"
        )
    weights = read_served_facts(facts) if reads_weights else None
    dtype = facts.dtype if options.dtype == "auto" else options.dtype
    rules.check_expert_widths(facts, device, DTYPE_BYTES[dtype])
    quantization = draft_quantization(options) if facts.stored is None else facts.stored.name
    num_parameters = num_parameters_of(facts, weights) or 0
    weight_bytes = weight_bytes_of(num_parameters, DTYPE_BYTES[dtype], quantization, facts.stored, weights, 0)
    layout, used_group = _without_kv(block_size), 0
    if any(facts.kv_needs):
        used_group = _existing(group, target)
        layout = draft_kv(options, facts, facts.kv_needs, block_size, DTYPE_BYTES[dtype])
    return DraftFacts(
        name=name,
        path=facts.path,
        architecture=facts.architecture,
        hf_config=facts.hf_config,
        dtype=dtype,
        vocab_size=facts.spec.vocab_size,
        embedding_width=facts.embedding_width,
        max_model_len=facts.spec.reach,
        quantization=quantization,
        weight_bytes=weight_bytes,
        kv=layout,
        block_bytes=layout.bytes_per_block,
        group=used_group,
        states=_state_layout(facts, block_size, DTYPE_BYTES[dtype]),
    )


def _state_layout(facts: ModelFacts, block_size: int, dtype_bytes: int) -> KvSpec | None:
    """Return the layout of a model's recurrent states (`DraftModelConfig.states`), if it has some."""
    sizes = {layer: need.num_bytes(dtype_bytes) for layer, need in enumerate(facts.state_needs) if need}
    if not sizes:
        return None
    groups = [KvGroup("full", []), KvGroup("state", list(sizes))]
    return KvSpec(groups, len(sizes), -(-max(sizes.values()) // ALIGNMENT) * ALIGNMENT, block_size)


def _check_tokens(name: str, ours: Mapping[int, str], served: Mapping[int, str]) -> None:
    """Compare the tokens of ids that both vocabularies have; one may have further tokens."""
    different = next(
        (each for each in sorted(ours.keys() & served.keys()) if ours[each] != served[each]), None
    )
    if different is not None:
        raise ConfigError(
            f"{FLAG}: draft model {name!r} has another vocabulary: token {different} is {ours[different]!r:.40} there and"
            f" {served[different]!r:.40} in the served model; use a draft model with the same tokenizer"
        )


def _tokens_of(folder: Path) -> dict[int, str]:
    """Return the tokens of ``tokenizer.json`` by id."""
    document: dict[str, Any] = read_json(folder / "tokenizer.json")
    vocabulary = document.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        tokens = {number: token for token, number in vocabulary.items()}
    else:
        tokens = {number: token for number, (token, _) in enumerate(vocabulary)}
    return tokens | {added["id"]: added["content"] for added in document.get("added_tokens", [])}
