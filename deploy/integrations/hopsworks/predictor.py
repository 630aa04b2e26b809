"""Predictor script of a Hopsworks deployment with a Python model server: upload it, and `server.yaml` as its configuration.

my_model.deploy(script_file="predictor.py", config_file="server.yaml", environment="…")     # one that has `quintet`

inputs: ["a prompt", {"prompt": "another", "max_tokens": 8}]
answer: {"predictions": [{"text": "…", "finish_reason": "stop", "error": ""}, …]}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quintet.deploy.config.config_file import read_config_file
from quintet.deploy.python_api.inputs import instance_by_name, params_by_name
from quintet.deploy.python_api.offline import LLM
from quintet.wire.params import OutputKind


class Predictor:
    """What Hopsworks looks for by this name."""

    def __init__(self) -> None:
        """Boot an engine for the files of the registered model. Raises `ConfigError` for flags that cannot work."""
        config = os.environ.get("CONFIG_FILE_PATH")
        flags = read_config_file(Path(config)) if config else {}
        self._llm = LLM(os.environ.get("MODEL_FILES_PATH"), **flags)

    def predict(self, inputs: Sequence[object]) -> dict[str, object]:
        """Complete all prompts of a request together; one that cannot be served has its error beside it.

        Raises `RequestError` for what is no prompt.
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
"""The name that its earlier versions look for."""
