"""CPU back end: the compiled kernels run a recorded program of the model, on one or several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES, NARROW_KV
from quintet.executor.backends.cpu.program.library import ProgramLibrary, program_library
from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import Unsupported
from quintet.executor.context import DRAFT, TARGET, WorkerContext
from quintet.executor.distributed.parallel.pipeline import Pipeline
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.distributed.parallel.ranks import Ranks, open_links, open_ranks, share_of_rank
from quintet.executor.interface import StepWorker
from quintet.executor.kv_memory import KvMemory
from quintet.executor.loading import MODEL_DTYPES
from quintet.executor.model_config.share import aux_layers_of
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.draft_heads import MedusaHeads, MtpHead
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.model import CausalModel
from quintet.executor.runner import Runner
from quintet.executor.speculation.draft_model import DraftModel, draft_tokens
from quintet.executor.speculation.drafters import MakeDrafter
from quintet.executor.speculation.head import DraftHead, HeadDrafter, HeadLayer
from quintet.executor.speculation.medusa import MedusaDrafter
from quintet.executor.worker import Worker
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec


def make_worker(context: WorkerContext) -> StepWorker:
    """See `quintet.executor.backends.registry.Backend`. With several ranks, return when all are ready."""
    config, memory = context.config, context.memory
    if memory.stages:
        context.join(open_ranks(config, memory.stages[0], 0))
    if memory.links:
        return _make_pipeline_worker(context)
    program = open_program(context)
    runner = ProgramRunner(program, config, context.span)
    worker = Worker(context, runner, program, _open_drafter(context, program))
    if context.ranks is not None:
        context.ranks.wait_for_all()
        worker.facts["ranks"] = f"{context.share.size}{_on_hosts(context)}"
    return worker


def _make_pipeline_worker(context: WorkerContext) -> PipelineWorker:
    """Load the first stage of a pipeline. Raises `ConfigError` for drafts with recurrent states."""
    if context.config.scheduler.speculative is not None and context.config.model.kv.has_states:
        raise ConfigError(
            "--speculative-config is not supported with --pipeline-parallel-size for a model with recurrent states: drop"
            " one of them"
        )
    context.share = share_of_rank(context.config, 0)
    links = open_links(context.config, context.memory.links, 0)
    program = open_program(context)
    make_drafter = _open_drafter(context, program)
    pipeline = Pipeline(program, context.config, links, context.span)
    worker = PipelineWorker(context, pipeline, links, make_drafter)
    pipeline.wait_for_stages()
    worker.facts["ranks"] = f"{context.share.stages} stages of {context.share.size}{_on_hosts(context)}"
    return worker


def _open_drafter(context: WorkerContext, target: ModelProgram) -> MakeDrafter | None:
    """Load and record the draft model or head; None without one. Only rank 0 of the first stage has it."""
    speculative = context.config.scheduler.speculative
    draft = context.of_draft(draft_tokens(context.config.scheduler))
    if draft is None or speculative is None or speculative.draft is None:
        return None
    head = draft.load()
    context.models[DRAFT] = draft.models[TARGET]
    if isinstance(head, DraftHead | MedusaHeads):
        head.share(_decoder(context.load()))
    if isinstance(head, MtpHead):
        head.share_output(_decoder(context.load_output()))
    if isinstance(head, MedusaHeads):
        return partial(MedusaDrafter, head, _open_heads(draft, head, target), target, 1)
    try:
        programs = _open_programs(draft, head.layers if isinstance(head, DraftHead) else [head])
    except Unsupported as why:
        raise ConfigError(f"--speculative-config: draft model {draft.config.model.path}: {why}") from why
    runners = [ProgramRunner(program, draft.config) for program in programs]
    if isinstance(head, DraftHead):
        layers = [HeadLayer.of(*each) for each in zip(runners, programs, strict=True)]
        return partial(HeadDrafter, speculative.draft, head, layers, target, context.num_blocks())
    sizes = programs[0].max_tokens, context.config.model.vocab_size
    return partial(DraftModel, speculative.draft, runners[0], programs[0].kv, *sizes)


def _decoder(model: CausalModel) -> Decoder:
    assert isinstance(model, Decoder), "the configuration allows draft heads of decoders only"
    return model


def _open_heads(
    context: WorkerContext, model: MedusaHeads, target: ModelProgram
) -> list[tuple[torch.Tensor, Runner]]:
    """Record the heads, which have no keys and values; return features and runner of each."""
    kv, config = KvMemory(context.config.model.kv, (), target.dtype), context.config
    heads: list[tuple[torch.Tensor, Runner]] = []
    for head in model.heads:
        program = ModelProgram(target.library, head, config, target.dtype, kv, context.share)
        assert program.received_hidden is not None, "a head reads features"
        heads.append((program.received_hidden, ProgramRunner(program, config)))
    return heads


def _on_hosts(context: WorkerContext) -> str:
    hosts = context.config.executor.num_hosts
    return f" on {hosts} hosts" if hosts > 1 else ""


def open_program(context: WorkerContext) -> ModelProgram:
    """Load and record this process's layers. Raises `Unsupported` if the compiled kernels do not support them."""
    return _open_programs(context, [context.load()])[0]


def _open_programs(context: WorkerContext, models: Sequence[CausalModel]) -> list[ModelProgram]:
    """Record models with one KV memory, as `open_program` does."""
    config, kv, ranks = context.config, context.config.model.kv, context.ranks
    library = program_library()
    if library is None:
        raise _unsupported(context, "the compiled CPU kernels are not built")
    num_blocks, attentions = context.num_blocks(), [each for model in models for each in model.attentions]
    dtype = MODEL_DTYPES[config.model.dtype]
    kv_dtype = NARROW_KV.get(config.cache.dtype, dtype)
    code = DTYPE_CODES[kv_dtype]
    if not all(_takes_layer(library, layer, code, kv.block_size) for layer in attentions):
        widest = max(max(layer.head_dim, layer.value_width) for layer in attentions)
        raise _unsupported(
            context,
            "the compiled attention supports head sizes up to 576 for keys and 512 for values, and block sizes that are"
            f" multiples of 16 tokens; this model has head size {widest} and block size {kv.block_size}",
        )
    if ranks is not None and not ranks.share.stripe.is_alone:
        context.kv = memory = _share_kv(kv, num_blocks, kv_dtype, ranks)
    else:
        memory = context.reserve_kv(kv_dtype)
    aux_layers = aux_layers_of(config.scheduler)
    return [
        ModelProgram(library, model, config, dtype, memory, context.share, ranks, aux_layers)
        for model in models
    ]


def _takes_layer(library: ProgramLibrary, layer: AttentionLayer, code: int, block_size: int) -> bool:
    """Return whether the kernels support the layer with a KV cache of this dtype code."""
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    return bool(library.kv_block_bytes(code, *heads, block_size, layer.values_in_keys))


def _share_kv(spec: KvSpec, num_blocks: int, dtype: torch.dtype, ranks: Ranks) -> KvMemory:
    """Map the KV memory that ranks share. A place that only layers of other stages use is empty."""
    share, used = ranks.share, spec.places_of(ranks.share.has_layer)
    memory = ranks.kv_blocks(spec.layer_bytes).view(spec.layers_per_block, num_blocks, spec.layer_bytes)
    places = [memory[place][:, : spec.layer_bytes * (place in used)] for place in range(len(memory))]
    return KvMemory(spec, places, dtype, share.stripe)


def _unsupported(context: WorkerContext, reason: str) -> ConfigError:
    """Return the error for a model; torch replaces the kernels unless other flags need them."""
    executor = context.config.executor
    if executor.num_ranks > 1 or executor.sum_leaves > 1:
        return ConfigError(
            f"--tensor-parallel-size and --pipeline-parallel-size need the compiled CPU kernels: {reason}"
        )
    return Unsupported(reason)
