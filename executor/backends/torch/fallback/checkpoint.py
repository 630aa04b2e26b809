"""Model folder, read by transformers: configuration, model with or without weights, and remote code.

Errors of transformers become a `ConfigError` of one line.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_log

from quintet.executor.backends.torch.fallback.attention import NO_INTERFACE, PREFIX, UnsupportedModel
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import nearest
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_SHOWN = 300
"""Maximum number of characters of a transformers error that are repeated."""


class Checkpoint:
    """A model folder that transformers supports, or with trusted remote code."""

    def __init__(self, hf_config: HfConfig, folder: Path, dtype: torch.dtype, trusts_code: bool) -> None:
        """Read the config with transformers. Raises ConfigError, also for remote code without --trust-remote-code."""
        self._folder = folder
        self._dtype = dtype
        self._trusts_code = trusts_code
        transformers_log.set_verbosity_error()
        transformers_log.disable_progress_bar()
        files = _code_files(hf_config)
        if files and not trusts_code:
            known = self._try_hf_config()
            if known is None:
                raise ConfigError(
                    f"{folder}: the model needs the checkpoint's own code ({', '.join(files)}), which is not part of"
                    " transformers; review it, then allow it with --trust-remote-code; it runs with all rights of this process"
                )
            self.config = known
            return
        if not files:
            _check_kind(hf_config)
        if files:
            log.warning("--trust-remote-code: executing %s of %s", ", ".join(files), folder)
        self.config = self._guarded("cannot read the config", lambda: self._hf_config(trusts_code))

    def empty_model(self, attention: str) -> PreTrainedModel:
        """Return the model on the meta device, to record its attention. In bf16, which all operations support."""

        def make() -> PreTrainedModel:
            with torch.device("meta"):
                return self._of_config(torch.bfloat16, attention)

        return self._guarded("cannot build the model", make)

    def load(self, attention: str, device: torch.device) -> PreTrainedModel:
        """Return the model with the folder's weights: safetensors, or torch files through the weights-only reader."""

        def load() -> PreTrainedModel:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self._folder,
                config=copy.deepcopy(self.config),
                dtype=self._dtype,
                attn_implementation=attention,
                trust_remote_code=self._trusts_code,
                local_files_only=True,
                output_loading_info=True,
            )
            model: PreTrainedModel
            model, report = loaded
            self._check(report)
            model.eval().to(device)
            return model

        return self._guarded("cannot load the weights", load)

    def random_model(self, attention: str, device: torch.device, seed: int) -> PreTrainedModel:
        """Return the model with random initial weights."""
        torch.manual_seed(seed)

        def make() -> PreTrainedModel:
            model = self._of_config(self._dtype, attention)
            model.eval().to(device)
            return model

        return self._guarded("cannot build the model", make)

    def _of_config(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(self.config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=self._trusts_code,
        )
        return model

    def _hf_config(self, trusts_code: bool) -> PreTrainedConfig:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            self._folder, trust_remote_code=trusts_code, local_files_only=True
        )
        return config

    def _try_hf_config(self) -> PreTrainedConfig | None:
        """Return the configuration if transformers has a built-in class for the config, otherwise None."""
        try:
            config = self._hf_config(False)
        except (ValueError, KeyError, OSError):
            return None
        return config if type(config) in AutoModelForCausalLM._model_mapping else None

    def _check(self, report: dict[str, Any]) -> None:
        """Reject missing weights and shape mismatches, which transformers only warns about."""
        missing, wrong = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
        if missing or wrong:
            names = missing or wrong
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{self._folder}: tensor {names[0]!r:.100}{more} {'is missing' if missing else 'has another shape'}: the"
                " weights belong to another model, or the download is incomplete"
            )

    def _guarded(self, problem: str, do: Callable[[], ResultT]) -> ResultT:
        """Return the result of ``do``; convert errors of transformers to `ConfigError` or `UnsupportedModel`."""
        try:
            return do()
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if PREFIX in str(error):
                raise UnsupportedModel(NO_INTERFACE) from error
            text = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._folder}: transformers {problem}: {text[:_SHOWN]}") from error


def _check_kind(hf_config: HfConfig) -> None:
    """Reject a config with a model_type that transformers does not have."""
    kind, names = hf_config.values.get("model_type"), hf_config.values.get("architectures")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return
    near = nearest(str(names[0])) if isinstance(names, list) and names else None
    suggestion = f"; the most similar architecture of Quintet is {near}" if near else ""
    raise ConfigError(
        f"{hf_config.path}: neither Quintet nor transformers {transformers.__version__} supports model_type"
        f" {kind!r:.80}{suggestion}. Install a later transformers, or use a checkpoint with its own code (auto_map)"
    )


def _code_files(hf_config: HfConfig) -> list[str]:
    """Return the Python files in the config's auto_map. Raises ConfigError for files of other repositories."""
    values = hf_config.section("auto_map").values.values()
    paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
    modules = sorted({path.rpartition(".")[0] for path in paths if isinstance(path, str)})
    external = [module for module in modules if "--" in module]
    if external:
        raise ConfigError(
            f"{hf_config.path}: auto_map refers to code of another repository, {external[0]!r:.100}; copy its files into this"
            " folder and remove the repository from auto_map"
        )
    return [f"{module}.py" for module in modules]
