"""Calibration: runs the model over a text once, in this process, and quantizes it layer by layer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import available_ram_bytes, format_size
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.deploy.tools.quantize.windows import MAX_CALIBRATION_TOKENS, windows_of_text
from quintet.executor.checkpoints.quantize_tool.awq import AwqRounder
from quintet.executor.checkpoints.quantize_tool.calibrate import calibrated
from quintet.executor.checkpoints.quantize_tool.compressed import Plan
from quintet.executor.checkpoints.quantize_tool.rounding import GptqRounder
from quintet.wire.errors import ConfigError


def calibrate(facts: ModelFacts, plan: Plan, text: str, on_progress: Callable[[int], object]) -> Plan:
    """Return a plan with layers quantized by GPTQ or AWQ for a text. Raises `ConfigError`."""
    source = facts.path
    if plan.layers.has_experts:
        raise ConfigError(
            f"MODEL {str(source)!r} has experts, which see too few calibration tokens: use --format int4"
        )
    if plan.target.is_awq and not plan.layers.makers:
        raise ConfigError(
            f"MODEL {str(source)!r} is {facts.architecture}; AWQ scales the norms or up-projections that produce a layer's"
            " inputs, and finds none that only this layer reads: use --format gptq"
        )
    weight_bytes = sum(entry.num_bytes for file in plan.files for entry in file.entries.values())
    if weight_bytes > available_ram_bytes():
        raise ConfigError(
            f"calibration loads all weights, {format_size(weight_bytes)}, but {format_size(available_ram_bytes())} of memory is"
            " available: use --format int4, which loads one tensor at a time"
        )
    windows = windows_of_text(facts, text)
    longest = max(map(len, windows))
    options = Options(
        model=str(source),
        device="cpu",
        max_model_len=longest,
        max_num_seqs=1,
        kv_cache_memory="1TiB",  # not allocated: `calibrated` allocates the blocks that its windows need
    )
    config = resolve(options, Path(tempfile.gettempdir()) / "quintet-calibrate", http=False).config
    if config.model.kv.has_states:
        raise ConfigError(
            f"MODEL {str(source)!r} has recurrent states, which calibration does not support: use --format int4"
        )
    selected = windows[: max(1, MAX_CALIBRATION_TOKENS // longest)]
    if plan.target.is_awq:
        by_awq = AwqRounder(plan.layers.makers)
        calibrated(config.model, selected, by_awq, on_progress)
        return replace(plan, known=by_awq.found, divided=by_awq.divided)
    by_gptq = GptqRounder(plan.target, plan.scale_dtype)
    calibrated(config.model, selected, by_gptq, on_progress)
    return replace(plan, known=by_gptq.found)
