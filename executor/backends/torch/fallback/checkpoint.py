"""A model folder as transformers reads it: its configuration, the model with or without weights, and code it may bring.

Knows nothing of steps. All that transformers raises becomes a `ConfigError` of one line.
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

from quintet.executor.backends.torch.fallback.attention import NO_INTERFACE, PREFIX, NotServed
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.registry import nearest
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_SHOWN = 300
"""Characters of what transformers says that an error repeats."""


class Checkpoint:
    """A folder with a card that transformers knows, or that brings code which may be executed."""

    def __init__(self, card: ModelCard, folder: Path, dtype: torch.dtype, trusts_code: bool) -> None:
        """Have transformers read the card as well. Raises ConfigError, also for code that nobody trusts."""
        self._folder = folder
        self._dtype = dtype
        self._trusts_code = trusts_code
        transformers_log.set_verbosity_error()
        transformers_log.disable_progress_bar()
        files = _code_files(card)
        if files and not trusts_code:
            known = self._try_card()
            if known is None:
                raise ConfigError(
                    f"{folder}: the model is code that its checkpoint brings ({', '.join(files)}), not part of transformers;"
                    " --trust-remote-code executes it, with all the rights of this process: read it first"
                )
            self.config = known
            return
        if not files:
            _check_kind(card)
        if files:
            log.warning("--trust-remote-code: executing %s of %s", ", ".join(files), folder)
        self.config = self._told("cannot read the card", lambda: self._card(trusts_code))

    def empty_model(self, attention: str) -> PreTrainedModel:
        """Return the model with no memory behind its weights, to learn what it does. In bf16, which all operations take."""

        def make() -> PreTrainedModel:
            with torch.device("meta"):
                return self._of_config(torch.bfloat16, attention)

        return self._told("cannot build the model", make)

    def load(self, attention: str, device: torch.device) -> PreTrainedModel:
        """Return the model with the folder's weights: safetensors, or torch's own files through its weights-only reader."""

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

        return self._told("cannot load the weights", load)

    def random_model(self, attention: str, device: torch.device, seed: int) -> PreTrainedModel:
        """Return the model as it is before any training."""
        torch.manual_seed(seed)

        def make() -> PreTrainedModel:
            model = self._of_config(self._dtype, attention)
            model.eval().to(device)
            return model

        return self._told("cannot build the model", make)

    def _of_config(self, dtype: torch.dtype, attention: str) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(self.config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=self._trusts_code,
        )
        return model

    def _card(self, trusts_code: bool) -> PreTrainedConfig:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            self._folder, trust_remote_code=trusts_code, local_files_only=True
        )
        return config

    def _try_card(self) -> PreTrainedConfig | None:
        """Return the card's configuration where transformers has a class of its own for it."""
        try:
            config = self._card(False)
        except (ValueError, KeyError, OSError):
            return None
        return config if type(config) in AutoModelForCausalLM._model_mapping else None

    def _check(self, report: dict[str, Any]) -> None:
        """Reject weights that are missing or of another shape; transformers only warns, and makes them up."""
        missing, wrong = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
        if missing or wrong:
            names = missing or wrong
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"{self._folder}: tensor {names[0]!r:.100}{more} {'is missing' if missing else 'has another shape'}: the"
                " weights belong to another model, or the download is incomplete"
            )

    def _told(self, what: str, do: Callable[[], ResultT]) -> ResultT:
        """Return what ``do`` returns; what transformers finds wrong is a `ConfigError`, or `NotServed`."""
        try:
            return do()
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if PREFIX in str(error):
                raise NotServed(NO_INTERFACE) from error
            said = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._folder}: transformers {what}: {said[:_SHOWN]}") from error


def _check_kind(card: ModelCard) -> None:
    """Reject a card of a kind that transformers has no class for."""
    kind, names = card.values.get("model_type"), card.values.get("architectures")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return
    near = nearest(str(names[0])) if isinstance(names, list) and names else None
    ours = f"; the nearest of Quintet's own is {near}" if near else ""
    raise ConfigError(
        f"{card.path}: neither Quintet nor transformers {transformers.__version__} knows model_type {kind!r:.80}{ours}. A later"
        " transformers may know it; code that the checkpoint brings is named by auto_map"
    )


def _code_files(card: ModelCard) -> list[str]:
    """Return the Python files that the card names as the model's. Raises ConfigError for those of other repositories."""
    named = card.section("auto_map").values.values()
    paths = [path for value in named for path in (value if isinstance(value, list) else [value])]
    modules = sorted({path.rpartition(".")[0] for path in paths if isinstance(path, str)})
    elsewhere = [module for module in modules if "--" in module]
    if elsewhere:
        raise ConfigError(
            f"{card.path}: auto_map names code of another repository, {elsewhere[0]!r:.100}; copy its files into this folder"
            " and name them without the repository"
        )
    return [f"{module}.py" for module in modules]
