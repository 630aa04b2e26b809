"""Which tensor of a checkpoint is which of those a model expects: checked by name, shape and number format before any is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from quintet.executor.checkpoints.weights.file import WeightFile
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

READ_FORMATS = ("BF16", "F16", "F32", "F64")
"""Number formats of checkpoints, as safetensors names them: whoever quantized one says elsewhere what its numbers mean."""

IGNORED = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
"""Buffers that old versions of transformers saved beside the weights; they are computed, not read."""

_QUANTIZED = ": where it is quantized, config.json's quantization_config must say how"


def expected_names(plan: WeightPlan, files: Sequence[WeightFile]) -> dict[str, str]:
    """Return the name that the plan has for each of the checkpoint's tensors that it wants.

    Raises `ConfigError`, one line, for a tensor that is missing, misspelt, superfluous, of another shape or of a format that is
    not read.
    """
    there = {name for file in files for name in file.entries}
    wanted: dict[str, str] = {}
    missing: list[str] = []
    for name in plan.expected:
        found = next((each for each in (name, *_other_spellings(plan, name)) if each in there), None)
        if found is None:
            missing.append(name)
        else:
            wanted[found] = name
    _check_entries(plan, files, wanted)
    strangers = [(file, name) for file in files for name in file.entries if _is_strange(plan, wanted, name)]
    if strangers:
        raise _stranger(plan, *strangers[0], missing)
    if missing:
        name = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = files[0].path if len(files) == 1 else files[0].path.parent
        raise ConfigError(
            f"{where}: tensor {name!r} {list(plan.expected[name].shape)} is missing{more};"
            " the download may be incomplete"
        )
    return wanted


def _other_spellings(plan: WeightPlan, name: str) -> Iterator[str]:
    """Yield what checkpoints call an expected tensor besides: an alias, or the name with or without its prefix."""
    if name in plan.aliases:
        yield plan.aliases[name]
    if plan.prefix:
        yield name.removeprefix(plan.prefix) if name.startswith(plan.prefix) else plan.prefix + name


def _is_strange(plan: WeightPlan, wanted: dict[str, str], name: str) -> bool:
    if name in wanted or _other_form(name) in wanted:
        return False
    spellings = (name, plan.prefix + name)
    if plan.elsewhere and any(
        _is_elsewhere(plan, each) for each in (*spellings, name.removeprefix(plan.prefix))
    ):
        return False
    return not any(fnmatchcase(each, pattern) for each in spellings for pattern in (*IGNORED, *plan.ignored))


def _is_elsewhere(plan: WeightPlan, name: str) -> bool:
    return any(char == "." and name[:end] in plan.elsewhere for end, char in enumerate(name))


def _other_form(name: str) -> str:
    """Return what the same rows are called in numbers, or in a file's blocks."""
    layer, _, leaf = name.rpartition(".")
    return f"{layer}.{'blocks' if leaf == 'weight' else 'weight'}"


def _check_entries(plan: WeightPlan, files: Sequence[WeightFile], wanted: dict[str, str]) -> None:
    """Reject a tensor whose shape or number format is not what the plan expects."""
    for file in files:
        for name, entry in file.entries.items():
            if name not in wanted:
                continue
            expected = plan.expected[wanted[name]]
            shape, formats = expected.shape, READ_FORMATS if expected.codes is None else expected.codes.kinds
            if entry.shape != shape:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has shape {list(entry.shape)!s:.80}; {_card(file)} asks for {list(shape)}"
                )
            if entry.dtype not in formats:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has the number format {entry.dtype}; it must be one of"
                    f" {', '.join(formats)}{'' if is_gguf(file.path) else _QUANTIZED}"
                )


def _stranger(plan: WeightPlan, file: WeightFile, name: str, missing: list[str]) -> ConfigError:
    """Return the error for a tensor that there is no place for: misspelt, if one that is missing has a name like it."""
    entry = file.entries[name]
    what = f"{file.path}: holds a tensor {name!r:.80} {list(entry.shape)!s:.80}"
    alike = [each for each in missing if plan.expected[each].shape == entry.shape]
    near = difflib.get_close_matches(name[:200], alike, n=1, cutoff=0.8)
    if near:
        return ConfigError(
            f"{what}, and {_card(file)}'s architecture expects {near[0]!r}: it may be misspelt, or the weights belong to"
            " another model"
        )
    return ConfigError(
        f"{what} that {_card(file)}'s architecture has no place for; the weights belong to another model"
    )


def _card(file: WeightFile) -> str:
    """Return where it is said which model the weights are of."""
    return "its metadata" if is_gguf(file.path) else "config.json"
