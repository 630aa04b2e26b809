"""Predictor script of a Hopsworks deployment with a Python model server; `server.yaml` is its configuration file.

my_model.deploy(script_file="predictor.py", config_file="server.yaml", environment="…")     # one that has `quintet`

inputs: ["a prompt", {"prompt": "another", "max_tokens": 8}]
answer: {"predictions": [{"text": "…", "finish_reason": "stop", "error": ""}, …]}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quintet.deploy.config.flag_table import read_config_file
from quintet.deploy.python_api.inputs import instance_by_name, params_by_name
from quintet.deploy.python_api.offline import LLM
from quintet.wire.params import OutputKind


class Predictor:
    """Predictor class; Hopsworks requires this name."""

    def __init__(self) -> None:
        """Start an engine for the registered model. Raises `ConfigError` for invalid flags."""
        config = os.environ.get("CONFIG_FILE_PATH")
        flags = read_config_file(Path(config)) if config else {}
        self._llm = LLM(os.environ.get("MODEL_FILES_PATH"), **flags)

    def predict(self, inputs: Sequence[object]) -> dict[str, object]:
        """Complete all prompts of a request; a failed one has ``error`` set.

        Raises `RequestError` for an invalid prompt.
        """
        read = [instance_by_name(instance, {}) for instance in inputs]
        outputs = self._llm.generate(
            [prompt for prompt, _ in read],
            [params_by_name(settings, OutputKind.FINAL_ONLY) for _, settings in read],
            use_tqdm=False,
            errors="return",
        )
        return {
            "predictions": [
                {"text": "", "finish_reason": "error", "error": output.error.message}
                if output.error
                else {
                    "text": output.outputs[0].text,
                    "finish_reason": output.outputs[0].finish_reason,
                    "error": "",
                }
                for output in outputs
            ]
        }


Predict = Predictor
"""Name required by earlier Hopsworks versions."""
