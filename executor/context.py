"""Everything that the models of one process share: device, ranks, KV memory; and the loaded models, by name.

A back end builds its worker from a context. Imports no torch: the device and the models are opened on first use.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from quintet.executor.backends.platforms.platform import Platform, open_platform
from quintet.executor.model_config.share import OUTPUT, WHOLE, Share, share_of
from quintet.executor.model_config.state_specs import (
    STATES_PER_REQUEST,
    num_draft_model_states,
    num_draft_states,
)
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
    from quintet.executor.backends.cpu.ops.huge_pages import HugePages
    from quintet.executor.distributed.parallel.ranks import Ranks
    from quintet.executor.kv_memory import KvMemory
    from quintet.executor.models.model import CausalModel
    from quintet.wire.kv_spec import KvSpec

TARGET, DRAFT, DRAFT_OUTPUT = "target", "draft", "draft output"
"""Names of the model that the server serves, of its draft model, and of the whole output layer that a head needs."""

DEFAULT_KV_BYTES = 4 << 30
"""KV memory on a GPU without our kernels, a mode for trial use."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Descriptors of the memory that the ranks of a model share; empty for a single process."""

    stages: tuple[int, ...] = ()
    """Of the ranks of each stage; see `quintet.executor.distributed.parallel.ranks`."""
    links: tuple[int, ...] = ()
    """Between each stage and the next; see `quintet.executor.distributed.parallel.ranks`."""
    gather: tuple[int, ...] = ()
    """Of gathered KV blocks; see `quintet.executor.distributed.parallel.whole_blocks`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights."""

    num_bytes: int
    """Size of the weights."""
    load_s: float
    causal: CausalModel | None = None
    """None if transformers runs it."""
    pages: HugePages | None = None
    """Host memory of the weights, if part of it may be on small pages."""


@dataclass(slots=True)
class WorkerContext:
    """The device, the ranks, the KV memory and the loaded models of a process."""

    config: EngineConfig
    span: TraceSpan = no_span
    memory: RankMemory = RankMemory()
    ahead: HugeMemory | None = None
    """Reserved memory for host weights; see `quintet.executor.checkpoints.weights.store.reserve`."""
    ranks: Ranks | None = None
    """The ranks of this process's stage, if there are several; opened by the back end."""
    share: Share = WHOLE
    """The share of the model that this process computes."""
    models: dict[str, LoadedModel] = field(default_factory=dict)
    kv: KvMemory | None = None
    """KV memory of all models, after the back end has reserved it."""
    states: tuple[KvSpec, int] | None = None
    """Recurrent states of a draft model (`DraftModelConfig.states`), and their number."""
    _platform: Platform | None = None
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.share is WHOLE:
            self.share = share_of(self.config.executor, 0)

    def join(self, ranks: Ranks | None) -> None:
        """Take the share of a rank. ranks: of its stage; None if the stage has only one."""
        if ranks is not None:
            self.ranks, self.share = ranks, ranks.share

    @property
    def platform(self) -> Platform:
        """The configured device, opened on first use."""
        if self._platform is None:
            self._platform = open_platform(self.config.executor)
        return self._platform

    def add(self, num_bytes: int, causal: CausalModel | None = None, pages: HugePages | None = None) -> None:
        """Add the served model after its weights are loaded; see `LoadedModel`."""
        self.models[TARGET] = LoadedModel(num_bytes, time.monotonic() - self._started, causal, pages)

    def load(self, *, on_device: bool = False) -> CausalModel:
        """Return the served model with its weights, loaded on first use. Raises `ConfigError`.

        on_device: whether our GPU kernels multiply by the weights.
        """
        loaded = self.models.get(TARGET)
        if loaded is None or loaded.causal is None:
            from quintet.executor.loading import load_model  # imports torch

            model = load_model(
                self.config, self.platform, on_device=on_device, share=self.share, ahead=self.ahead
            )
            self.add(model.weights.num_bytes, model, model.weights.reservation)
            return model
        return loaded.causal

    def load_output(self, *, on_device: bool = False) -> CausalModel:
        """Return the part of the served model after its layers, whole. Other ranks have it, or parts of it. See `load`."""
        if self.share.is_all and self.share.is_last:
            return self.load(on_device=on_device)
        from quintet.executor.loading import load_model  # imports torch

        model = load_model(self.config, self.platform, on_device=on_device, share=OUTPUT)
        self.models[DRAFT_OUTPUT] = LoadedModel(
            model.weights.num_bytes, 0.0, model, model.weights.reservation
        )
        return model

    @property
    def pages(self) -> list[HugePages]:
        """Host memory of the models' weights, part of which may be on small pages."""
        return [each.pages for each in self.models.values() if each.pages is not None]

    def num_blocks(self) -> int:
        """Return the number of KV blocks that fit into the configured memory. Raises `ConfigError`."""
        memory_bytes, kv = self.config.cache.memory_bytes or DEFAULT_KV_BYTES, self.config.model.kv
        num_blocks = kv.num_blocks(memory_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"the KV cache has {memory_bytes} bytes, but one block needs {kv.bytes_per_block};"
                " raise --kv-cache-memory"
            )
        return num_blocks

    def reserve_kv(self, dtype: torch.dtype) -> KvMemory:
        """Reserve the KV memory of this process's layers. dtype: of keys and values. Raises `ConfigError`."""
        from quintet.executor.kv_memory import KvMemory  # imports torch

        kv, device, num_blocks = self.config.model.kv, self.platform.device, self.num_blocks()
        num_states = num_draft_states(self.config.scheduler, kv, num_blocks)
        self.kv = KvMemory.reserve(kv, num_blocks, dtype, device, self.share, num_states)
        if self.states is not None:
            spec, num_states = self.states
            self.kv.states = KvMemory.reserve(spec, num_states, dtype, device)
        return self.kv

    def of_draft(self, max_step_tokens: int) -> WorkerContext | None:
        """Return the context of the draft model, with as many KV blocks; None without one.

        This process computes the whole draft model. max_step_tokens: limit of a step.
        """
        speculative, scheduler = self.config.scheduler.speculative, self.config.scheduler
        if speculative is None or speculative.draft is None:
            return None
        model, replace, num_blocks = speculative.draft.model, msgspec.structs.replace, self.num_blocks()
        config = replace(
            self.config,
            model=model,
            cache=replace(
                self.config.cache,
                memory_bytes=num_blocks * model.kv.bytes_per_block,
                dtype="model",
                swap_bytes=0,
            ),
            executor=replace(
                self.config.executor,
                quantization=speculative.draft.quantization,
                activation_dtype="auto",
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                expert_parallel=False,
                eplb=None,
                sum_leaves=1,
                hosts=None,
            ),
            scheduler=replace(scheduler, max_num_batched_tokens=max_step_tokens, speculative=None),
        )
        states = None
        if speculative.draft.states is not None:
            num_requests = num_draft_model_states(scheduler, self.config.model.kv, num_blocks)
            states = speculative.draft.states, STATES_PER_REQUEST * num_requests
        return WorkerContext(config, states=states, _platform=self._platform)

    def facts(self, num_blocks: int) -> dict[str, str]:
        """Return the facts for the start-up log."""
        model, loaded = self.config.model, self.models[TARGET]
        suffix = " by transformers" if model.implementation == "transformers" else ""
        facts = {
            "worker": f"{model.architecture}{suffix} in {model.dtype} on {self.platform.description}",
            "weights": f"{loaded.num_bytes / 1e6:.1f} MB in {loaded.load_s:.1f} s",
            "blocks": str(num_blocks),
        }
        drafts = [self.models[name].num_bytes for name in (DRAFT, DRAFT_OUTPUT) if name in self.models]
        if drafts:
            facts["draft"] = f"{sum(drafts) / 1e6:.1f} MB of weights"
        return facts
