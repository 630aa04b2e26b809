"""Configuration of speculative decoding (``--speculative-config``), in vLLM's format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.weights import loaded_quantization
from quintet.wire.config import MAX_DRAFTS, DraftModelConfig, Quantization, SpeculativeConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec
from quintet.wire.model_files import read_json

FLAG = "--speculative-config"
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
MAX_LOOKUP = 32
"""Maximum number of newest tokens that prompt lookup compares."""

METHOD_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_corpus_tokens",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": ("model",),
    "eagle": ("model",),
    "eagle3": ("model",),
    "medusa": ("model",),
    "mtp": (),
}
"""Keys of each method besides ``num_speculative_tokens``."""

MTP_ALIASES = (
    *("deepseek_mtp", "ernie_mtp", "exaone4_5_mtp", "exaone_moe_mtp", "glm4_moe_lite_mtp", "glm4_moe_mtp"),
    *("glm_ocr_mtp", "hy_v3_mtp", "longcat_flash_mtp", "mimo_mtp", "mimo_v2_mtp", "nemotron_h_mtp"),
    *("pangu_ultra_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "step3p5_mtp"),
)
"""vLLM's other names of the method ``mtp``."""

NGRAM_MODELS = ("ngram", "[ngram]")
"""Values of ``model`` with which older vLLM versions meant the method ``ngram``."""

NO_EFFECT = {
    *("attention_backend", "disable_by_batch_size", "disable_log_stats", "disable_logprobs"),
    *("disable_mqa_scorer", "disable_padded_drafter_batch", "draft_load_config", "draft_sample_method"),
    *("draft_tensor_parallel_size", "enforce_eager", "kv_cache_dtype", "max_model_len", "moe_backend"),
    *("num_speculative_tokens_per_batch_size", "tensor_parallel_size", "use_local_argmax_reduction"),
}
"""Keys of vLLM that change its speed or memory, not outputs. They have no effect here."""

QUANTIZATIONS = ("none", "int8", "int4", "w8a8")
"""Values of the key ``quantization`` with effect. The others of vLLM name formats of checkpoints, which are read anyway."""

SUFFIX_RANGES: dict[str, tuple[float, float]] = {
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, 1 << 24),
    "suffix_decoding_corpus_tokens": (1024, 1 << 28),
    "suffix_decoding_max_spec_factor": (0, 1024),
    "suffix_decoding_min_token_prob": (0, 1),
}
"""Smallest and largest value of each key."""


class Speculation(msgspec.Struct, forbid_unknown_fields=True):
    """The flag's value, with the keys of its method only."""

    num_speculative_tokens: int | None = None
    method: str = ""
    model: str | None = None
    """Name or path of the draft model or head."""
    quantization: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_corpus_tokens: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None

    @property
    def has_draft_model(self) -> bool:
        """True if drafts come from a second model or a head."""
        return self.method == "mtp" or "model" in METHOD_KEYS[self.method]


def speculative_config(
    options: Options,
    kind: Literal["torch", "mock"],
    device: Literal["cpu", "cuda"],
    draft: DraftModelConfig | None = None,
) -> SpeculativeConfig | None:
    """Return the section, or None without ``--speculative-config``. draft: its draft model. Raises `ConfigError`."""
    parsed = speculation(options)
    if parsed is None:
        return None
    check_support(options, kind, device)
    least, most = _lookup_range(parsed)
    given = {key: getattr(parsed, key) for key in METHOD_KEYS["suffix"] if getattr(parsed, key) is not None}
    config = SpeculativeConfig(prompt_lookup_min=least, prompt_lookup_max=most, draft=draft, **given)
    num_drafts = parsed.num_speculative_tokens
    if num_drafts is None and parsed.method == "suffix":
        num_drafts = min(config.suffix_decoding_max_tree_depth, MAX_DRAFTS)
    if num_drafts is None:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing; write JSON such as {EXAMPLE}")
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is {num_drafts}; it must be 1 to {MAX_DRAFTS}")
    return msgspec.structs.replace(config, method=parsed.method, num_speculative_tokens=num_drafts)


def draft_quantization(options: Options) -> Quantization:
    """Return the quantization at load of a draft model or head without one of its own: the key's, else the flag's.

    Raises `ConfigError`.
    """
    parsed = speculation(options)
    key = None if parsed is None else parsed.quantization
    return loaded_quantization(key if key is not None and key in QUANTIZATIONS else options.quantization)


def speculation(options: Options) -> Speculation | None:
    """Return the flag's value, or None without it. Raises `ConfigError`."""
    text = options.speculative_config
    if text is None:
        return None
    try:
        given = {key: value for key, value in _keys(text).items() if key not in NO_EFFECT}
        parsed = msgspec.convert(given, Speculation)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{FLAG} {text}: {error}; write JSON such as {EXAMPLE}") from None
    method = parsed.method or _usual_method(parsed.model)
    method = parsed.method = "mtp" if method in MTP_ALIASES else method
    if method == "mtp" and parsed.model in ("", options.model):  # names the checkpoint that is read anyway
        parsed.model = None
    if method not in METHOD_KEYS:
        raise ConfigError(
            f'{FLAG}: the method is "{method}"; it must be one of {", ".join(METHOD_KEYS)}: write {EXAMPLE}, or drop {FLAG}'
        )
    if "model" in METHOD_KEYS[method] and parsed.model is None:
        raise ConfigError(f"{FLAG}: the method {method} needs the key model, a folder or name of a model")
    for other, keys in METHOD_KEYS.items():
        for key in keys:
            if key not in METHOD_KEYS[method] and getattr(parsed, key) is not None:
                raise ConfigError(
                    f"{FLAG}: the key {key} is only for the method {other}: drop {key} or method"
                )
    for key, (least, most) in SUFFIX_RANGES.items():
        value = getattr(parsed, key)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{FLAG}: {key} is {value}; it must be {least} to {most}")
    return parsed


def _keys(text: str) -> dict[str, object]:
    """Return the values of a JSON object. Names may have dashes. Values that ask for nothing are omitted."""
    found = msgspec.json.decode(text, type=dict[str, object])
    given = {key.replace("-", "_"): value for key, value in found.items()}
    if given.get("model") in NGRAM_MODELS or given.get("method") == "ngram_gpu":
        given |= {"method": "ngram", "model": None}
    return {key: value for key, value in given.items() if value is not None and value is not False}


def notes_on_keys(options: Options) -> list[str]:
    """Return a note on the keys without effect. Raises `ConfigError`."""
    parsed = speculation(options)
    if parsed is None:
        return []
    given = _keys(options.speculative_config or "{}")
    ignored = sorted(given.keys() & NO_EFFECT)
    if "quantization" in given and not (parsed.has_draft_model and given["quantization"] in QUANTIZATIONS):
        ignored.append(f"quantization (with a draft model or head, {', '.join(QUANTIZATIONS)} have one)")
    return [f"{FLAG}: keys without effect: {', '.join(ignored)}"] if ignored else []


def check_model(
    options: Options,
    device: Literal["cpu", "cuda"],
    kv: KvSpec,
    implementation: Literal["quintet", "transformers"],
) -> None:
    """Reject models without speculative decoding on this device."""
    if options.speculative_config is None or device == "cpu":
        return
    if kv.has_states:
        raise ConfigError(
            f"{FLAG} is not supported on a GPU for models with recurrent states: drop it, or use --device cpu"
        )
    if implementation == "transformers":
        raise ConfigError(
            f"{FLAG} is not supported on a GPU for models that transformers computes: drop it, or use --device cpu"
        )


def notes_on_device(options: Options, device: Literal["cpu", "cuda"]) -> list[str]:
    """Return a note if outputs may depend on drafts."""
    if options.speculative_config is None or device == "cpu" or options.batch_invariant:
        return []
    return [f"{FLAG}: without --batch-invariant, outputs may depend on drafts, as they depend on the batch"]


def _usual_method(model: str | None) -> str:
    """Return the method without the key ``method``. As in vLLM, names of EAGLE heads count."""
    if model is None:
        return "ngram"
    name = model.lower()
    return "eagle" if "eagle-" in name else "eagle3" if "eagle3" in name else "draft_model"


def _lookup_range(parsed: Speculation) -> tuple[int, int]:
    most, least = parsed.prompt_lookup_max, parsed.prompt_lookup_min
    if most is None and least is None:
        most, least = SpeculativeConfig().prompt_lookup_max, SpeculativeConfig().prompt_lookup_min
    most = least if most is None else most
    least = most if least is None else least
    assert most is not None and least is not None
    if not 1 <= least <= most <= MAX_LOOKUP:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min is {least} and prompt_lookup_max {most}; they must be 1 to {MAX_LOOKUP}, in this order"
        )
    return least, most


def check_support(options: Options, kind: Literal["torch", "mock"], device: Literal["cpu", "cuda"]) -> None:
    """Reject devices and methods without speculative decoding."""
    parsed = speculation(options)
    if parsed is None:
        return
    if kind == "mock":
        raise ConfigError(f"{FLAG} is not supported with --executor mock: drop it")
    if device == "cuda" and parsed.has_draft_model and parsed.quantization in QUANTIZATIONS[1:]:
        raise ConfigError(
            f"{FLAG}: quantization {parsed.quantization} is only supported on the CPU (--device cpu): drop the key, or use a"
            " quantized draft model"
        )
    if device == "cuda" and options.allow_torch_kernels:
        raise ConfigError(f"{FLAG} is not supported with --allow-torch-kernels on a GPU: drop one of them")
    if options.model_impl == "transformers":
        raise ConfigError(f"{FLAG} is not supported with --model-impl transformers: drop one of them")


_HEAD_NAME = "speculator"
"""Part of the hub names of heads of the library ``speculators``: ``RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3``."""


class _Verifier(msgspec.Struct):
    name_or_path: str


class _Proposal(msgspec.Struct):
    speculative_tokens: int


class _SpeculatorsSection(msgspec.Struct):
    """The part ``speculators_config`` of ``config.json``; it names the model that the head was trained for."""

    algorithm: str
    verifier: _Verifier
    proposal_methods: Annotated[list[_Proposal], msgspec.Meta(min_length=1)]


def with_verifier(options: Options) -> Options:
    """Return options that serve the model of a head, with the head, if MODEL is a head; others unchanged.

    The server has the head's name, as in vLLM. May download the head's configuration. Raises `ConfigError`.
    """
    name = options.model
    if name is None or options.speculative_config is not None or not _may_be_head(name):
        return options
    path = locate_model(name, with_weights=False, revision=options.revision) / "config.json"
    section = read_json(path).get("speculators_config") if path.is_file() else None
    if section is None:
        return options
    try:
        found = msgspec.convert(section, _SpeculatorsSection)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: speculators_config: {error}; give MODEL and --speculative-config instead"
        ) from None
    draft = {
        "method": found.algorithm,
        "model": name,
        "num_speculative_tokens": found.proposal_methods[0].speculative_tokens,
    }
    return dataclasses.replace(
        options,
        model=found.verifier.name_or_path,
        revision=None,
        served_model_name=options.served_model_name or [name],
        speculative_config=json.dumps(draft),
    )


def _may_be_head(name: str) -> bool:
    return _HEAD_NAME in name.lower() or (Path(name).expanduser() / "config.json").is_file()
