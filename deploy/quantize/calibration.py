"""GPTQ's calibration: the model reads a text once, in this process, and is quantized meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from quintet.deploy.quantize.settings import MAX_CALIBRATION_TOKENS, WINDOW
from quintet.deploy.quantize.windows import windows_of_text
from quintet.deploy.resolve.build import resolve
from quintet.deploy.resolve.flags import Options
from quintet.executor.quantizing.calibrate import calibrated
from quintet.executor.quantizing.compressed import Plan
from quintet.executor.quantizing.rounding import Rounded
from quintet.wire.errors import ConfigError


def calibrate(source: Path, plan: Plan, text: str, told: Callable[[int], object]) -> Mapping[str, Rounded]:
    """Return the layers of a plan, rounded by GPTQ for a text. Raises `ConfigError`."""
    if plan.layers.has_experts:
        raise ConfigError(
            f"MODEL {str(source)!r} has experts, each of which sees too little of a text: take --format int4"
        )
    options = Options(model=str(source), device="cpu", max_model_len=WINDOW + 1, max_num_seqs=1)
    config = resolve(options, Path(tempfile.gettempdir()) / "quintet-calibrate", http=False).config
    if config.model.kv.has_states:
        raise ConfigError(
            f"MODEL {str(source)!r} keeps states, over which is not calibrated: take --format int4"
        )
    windows = windows_of_text(source, text)[: MAX_CALIBRATION_TOKENS // WINDOW]
    return calibrated(config.model, windows, plan.target, plan.scale_dtype, told)
