"""Match checkpoint tensors to the model's expected tensors by name, shape and number format, before any is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from quintet.executor.checkpoints.weights.mapped import WeightFile
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.model_config.names import expected_spellings, spellings
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

READ_FORMATS = ("BF16", "F16", "F32", "F64")
"""Number formats of unquantized checkpoints, as in safetensors headers; others need a quantization_config."""

IGNORED = (
    *("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached"),
    *("*.attn.bias", "*.attn.masked_bias"),
)
"""Computed buffers that old versions of transformers, and other trainers, saved."""

_QUANTIZED = ": a quantized checkpoint needs a quantization_config in config.json"


def expected_names(plan: WeightPlan, files: Sequence[WeightFile]) -> dict[str, str]:
    """Return the plan's name of each checkpoint tensor that it expects.

    Raises `ConfigError` for a tensor that is missing, misspelt, unexpected, of another shape or of an unsupported
    format.
    """
    present = {name for file in files for name in file.entries}
    wanted: dict[str, str] = {}
    missing: list[str] = []
    for name in plan.expected:
        found = next((each for each in (name, *_checkpoint_names(plan, name)) if each in present), None)
        if found is None:
            missing.append(name)
        else:
            wanted[found] = name
    _check_entries(plan, files, wanted)
    unexpected = [
        (file, name) for file in files for name in file.entries if _is_unexpected(plan, wanted, name)
    ]
    if unexpected:
        raise _unexpected_tensor(plan, *unexpected[0], missing)
    if missing:
        name = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = files[0].path if len(files) == 1 else files[0].path.parent
        raise ConfigError(
            f"{where}: tensor {name!r} {list(plan.expected[name].shape)} is missing{more};"
            " the download may be incomplete"
        )
    return wanted


def _checkpoint_names(plan: WeightPlan, name: str) -> Iterator[str]:
    """Yield the checkpoint names of an expected tensor: an alias, or the name's spellings."""
    if name in plan.aliases:
        yield plan.aliases[name]
    yield from spellings(name, plan.prefix)


def _is_unexpected(plan: WeightPlan, wanted: dict[str, str], name: str) -> bool:
    if name in wanted or _other_form(name) in wanted:
        return False
    expected = expected_spellings(name, plan.prefix)
    if plan.on_other_ranks and any(_is_on_other_rank(plan, each) for each in expected):
        return False
    return not any(fnmatchcase(each, pattern) for each in expected for pattern in (*IGNORED, *plan.ignored))


def _is_on_other_rank(plan: WeightPlan, name: str) -> bool:
    return any(char == "." and name[:end] in plan.on_other_ranks for end, char in enumerate(name))


def _other_form(name: str) -> str:
    """Return the other name of the same rows: as weight or as a file's blocks."""
    layer, _, leaf = name.rpartition(".")
    return f"{layer}.{'blocks' if leaf == 'weight' else 'weight'}"


def _check_entries(plan: WeightPlan, files: Sequence[WeightFile], wanted: dict[str, str]) -> None:
    """Reject a tensor with an unexpected shape or number format."""
    for file in files:
        for name, entry in file.entries.items():
            if name not in wanted:
                continue
            expected = plan.expected[wanted[name]]
            shape, formats = expected.shape, READ_FORMATS if expected.codes is None else expected.codes.kinds
            if entry.shape != shape:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has shape {list(entry.shape)!s:.80}; {_hf_config(file)} requires {list(shape)}"
                )
            if entry.dtype not in formats:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has the number format {entry.dtype}; it must be one of"
                    f" {', '.join(formats)}{'' if is_gguf(file.path) else _QUANTIZED}"
                )


def _unexpected_tensor(plan: WeightPlan, file: WeightFile, name: str, missing: list[str]) -> ConfigError:
    """Return the error for an unexpected tensor; suggests a misspelling if a missing name is similar."""
    entry = file.entries[name]
    what = f"{file.path}: unexpected tensor {name!r:.80} {list(entry.shape)!s:.80}"
    alike = [each for each in missing if plan.expected[each].shape == entry.shape]
    near = difflib.get_close_matches(name[:200], alike, n=1, cutoff=0.8)
    if near:
        return ConfigError(
            f"{what}; {_hf_config(file)}'s architecture expects {near[0]!r}: the name is misspelt, or the weights belong to"
            " another model"
        )
    return ConfigError(
        f"{what}: {_hf_config(file)}'s architecture does not have it; the weights belong to another model"
    )


def _hf_config(file: WeightFile) -> str:
    """Return the name of the model description, for messages."""
    return "its metadata" if is_gguf(file.path) else "config.json"
