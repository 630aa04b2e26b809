"""The draft model of speculative decoding: its files, its KV layout, and the checks that it fits the served model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.deploy.config.draft_head import HEAD_METHODS, HeadFacts, draft_kv, read_head
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import ModelFacts, read_facts
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.deploy.config.model.weights import (
    num_parameters_of,
    read_served_facts,
    weight_bytes_of,
)
from quintet.deploy.config.speculation import (
    FLAG,
    draft_model_name,
    draft_quantization,
    needs_draft_model,
    speculative_method,
)
from quintet.wire.config import DTYPE_BYTES, DraftModelConfig, Dtype, ModelConfig, Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import ALIGNMENT, KvGroup, KvSpec
from quintet.wire.model_files import read_json


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A draft model before the served model's context length and vocabulary are known."""

    name: str
    facts: ModelFacts
    dtype: Dtype
    quantization: Quantization
    weight_bytes: int
    kv: KvSpec
    group: int
    """See `DraftModelConfig.group`."""
    states: KvSpec | None
    """See `DraftModelConfig.states`."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """See `HeadFacts.sizes`."""
        return self.kv.bytes_per_block, self.weight_bytes, 0

    def of(self, model: ModelConfig) -> DraftModelConfig:
        """Return the configuration of the draft model of a served model. Raises `ConfigError` if their tokens differ."""
        tokenizer = tokenizer_folder(self.facts.path, advice=f"{FLAG}: a draft model needs its tokenizer")
        _check_tokens(self.name, _tokens_of(tokenizer), _tokens_of(Path(model.tokenizer_path)))
        return DraftModelConfig(
            model=ModelConfig(
                path=str(self.facts.path),
                tokenizer_path=str(tokenizer),
                served_names=[self.name],
                architecture=self.facts.architecture,
                hf_config=self.facts.hf_config,
                dtype=self.dtype,
                vocab_size=self.facts.spec.vocab_size,
                embedding_width=self.facts.embedding_width,
                max_model_len=min(model.max_model_len, self.facts.spec.reach),
                eos_token_ids=model.eos_token_ids,
                kv=self.kv,
            ),
            group=self.group,
            quantization=self.quantization,
            weight_bytes=self.weight_bytes,
            states=self.states,
        )


def read_draft(
    options: Options, target: ModelFacts, kv: KvSpec, dtype: Dtype
) -> DraftFacts | HeadFacts | None:
    """Return the draft model or head that the flags name, or None. kv, dtype: of the served model ``target``.

    Raises `ConfigError`.
    """
    name, method = draft_model_name(options), speculative_method(options)
    if not needs_draft_model(options):
        return None
    group = next((index for index, each in enumerate(kv.groups) if each.kind == "full"), None)
    if method == "medusa":
        group = 0  # unused: the heads have no keys and values
    if name is None or method in HEAD_METHODS:
        return read_head(name, options, target, dtype, kv.block_size, _existing(group, target))
    return _read_model(name, options, target, kv.block_size, group)


def _existing(group: int | None, target: ModelFacts) -> int:
    """Return the group, if there is one."""
    if group is None:
        raise ConfigError(
            f"{FLAG}: {target.path} has no layer with full attention; a draft model or head uses the blocks of such a layer: use"
            " the method ngram"
        )
    return group


def _read_model(
    name: str, options: Options, target: ModelFacts, block_size: int, group: int | None
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
    quantization = draft_quantization(options) if facts.stored is None else facts.stored.name
    num_parameters = num_parameters_of(facts, weights) or 0
    weight_bytes = weight_bytes_of(num_parameters, DTYPE_BYTES[dtype], quantization, facts.stored, weights, 0)
    states = _state_layout(facts, block_size, DTYPE_BYTES[dtype])
    if any(facts.kv_needs):
        group = _existing(group, target)
        layout = draft_kv(options, facts, facts.kv_needs, block_size, DTYPE_BYTES[dtype])
    else:
        group, layout = (
            0,
            KvSpec([KvGroup("full", [])], 1, ALIGNMENT, block_size),
        )  # unused: no keys and values
    return DraftFacts(name, facts, dtype, quantization, weight_bytes, layout, group, states)


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
