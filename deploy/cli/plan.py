"""``quintet plan``: what `quintet serve` would use, without starting anything."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quintet.deploy.cli.serve import add_option_arguments, options_of
from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, available_ram_bytes, format_size
from quintet.deploy.tools.kv_plan import KvDiskPlan, disk_plan, peers_plan, rows_of, store_plan
from quintet.executor.model_config.card import card_of
from quintet.executor.model_config.describe import describe
from quintet.executor.model_config.fitting import share_in_words
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.share import share_of, stage_layers
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import EngineConfig, KvPeersConfig, KvStoreConfig, ModelConfig
from quintet.wire.kv_spec import KvGroup, KvSpec

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  quintet plan                                        the small model that ships with Quintet
  quintet plan ./my-model --kv-cache-memory 4GiB      how many long requests fit into 4 GiB?
  quintet plan Qwen/Qwen3-0.6B --json                 for scripts
"""


class GroupPlan(msgspec.Struct, frozen=True):
    """Groups of layers that need the same: `quintet.wire.kv_spec.KvGroup`."""

    kind: str
    window: int
    num_groups: int
    num_layers: int
    blocks_per_request: int
    """The most that a request of full length holds at once, in all these groups."""


class KvFormatPlan(msgspec.Struct, frozen=True):
    """What a number format of keys and values would cost."""

    name: str
    """As ``--kv-cache-dtype`` has it."""
    dtype: str
    bytes_per_token: int
    num_tokens: int
    """Of long requests, that would fit into `Plan.kv_memory_bytes`; 0 where that is not known yet."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the server would use. Sizes in bytes; lengths in tokens."""

    model: str
    path: str
    architecture: str
    implementation: str
    """Whose layers compute: ``quintet`` or ``transformers``."""
    layers: str | None
    """What those of Quintet's own are made of."""
    num_ranks: int
    kv_ranks: int
    """Ranks that keep one KV memory together; what is said of KV memory is of all of them."""
    num_stages: int
    stages: str | None
    """Processes that compute a model together; what is said of KV and its memory is of each."""
    num_hosts: int
    """Machines that these are on, each with as many."""
    share: str | None
    """What one of them has; null where there is one."""
    dtype: str
    quantization: str
    activation_dtype: str
    checkpoint_format: str | None
    """How the checkpoint is quantized, in words; null where it is not."""
    device: str
    executor: str
    num_parameters: int | None
    """As the weights have them, else as the card says; None where only the executor knows."""
    weight_bytes: int | None
    max_model_len: int
    kv_bytes_per_token: int
    kv_groups: list[GroupPlan]
    kv_formats: list[KvFormatPlan]
    kv_memory_bytes: int
    block_size: int
    num_blocks: int
    max_full_length_requests: int
    """How many requests of `max_model_len` fit into KV memory at once."""
    max_num_seqs: int
    max_num_batched_tokens: int
    processes: dict[str, int]
    address: str
    available_memory_bytes: int
    attention_scratch_bytes: int
    """What attention takes beside KV, at most, on a CPU: of all processes of an engine, each as much."""
    shared_bytes: int
    """What the ranks of an engine share, at most; 0 where there is one."""
    kv_disk: KvDiskPlan | None
    """What is kept on disk; null where nothing is."""
    kv_store: KvStoreConfig | None
    """What servers share; null where they share nothing."""
    kv_peers: KvPeersConfig | None
    """What goes from server to server; null where nothing does."""
    notes: list[str]


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "plan",
        help="show what `serve` would use, without starting anything",
        description="Show what `quintet serve` with the same flags would use. Weights are not read, only their headers.",
        usage="quintet plan [MODEL] [--json] [--config FILE] [FLAG ...]",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_option_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    options, notes = options_of(arguments)
    resolution = resolve(options, Path(tempfile.gettempdir()) / "quintet-plan")
    resolution.notes.extend(notes)
    config = resolution.config
    if (config.executor.kind, config.model.implementation) == ("torch", "transformers"):
        from quintet.executor.backends.torch.fallback.boot import (
            examine_transformers_model,  # imports transformers: seconds
        )

        examine_transformers_model(config)
    plan = make_plan(resolution)
    print(msgspec.json.encode(plan).decode() if arguments.json else "\n".join(plan_lines(plan)))
    return 0


def make_plan(resolution: Resolution) -> Plan:
    """Read the plan off a resolved configuration."""
    config, weights = resolution.config, resolution.weights
    kv, processes = config.model.kv, config.processes
    num_blocks = kv.num_blocks(config.cache.memory_bytes)
    return Plan(
        model=config.model.served_names[0],
        path=config.model.path,
        architecture=config.model.architecture,
        implementation=config.model.implementation,
        layers=_layers(config.model),
        num_ranks=config.executor.tensor_parallel_size,
        kv_ranks=config.executor.decode_context_parallel_size,
        num_stages=config.executor.pipeline_parallel_size,
        stages=_stages(config),
        num_hosts=config.executor.num_hosts,
        share=_share(config),
        dtype=config.model.dtype,
        quantization=config.executor.quantization,
        activation_dtype=config.executor.activation_dtype,
        checkpoint_format=None if resolution.stored is None else resolution.stored.words,
        device=config.executor.device,
        executor=config.executor.kind,
        num_parameters=resolution.num_parameters,
        weight_bytes=weights.size_bytes if weights else None,
        max_model_len=config.model.max_model_len,
        kv_bytes_per_token=kv.bytes_per_token,
        kv_groups=_groups(kv, config.model.max_model_len, config.scheduler.max_num_batched_tokens),
        kv_formats=_kv_formats(resolution),
        kv_memory_bytes=config.cache.memory_bytes,
        block_size=kv.block_size,
        num_blocks=num_blocks,
        max_full_length_requests=num_blocks
        // kv.most_blocks(config.model.max_model_len, config.scheduler.max_num_batched_tokens),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        processes={
            "frontend": processes.frontends,
            "tokenizer": processes.tokenizers,
            "core": processes.engines,
            "executor": processes.engines,
            "detokenizer": processes.detokenizers,
        },
        address=f"{config.frontend.host}:{config.frontend.port}",
        available_memory_bytes=available_ram_bytes(),
        attention_scratch_bytes=ATTENTION_SCRATCH_BYTES * config.executor.num_ranks
        if (config.executor.kind, config.executor.device) == ("torch", "cpu")
        else 0,
        shared_bytes=config.executor.shared_bytes,
        kv_disk=disk_plan(config),
        kv_store=store_plan(config),
        kv_peers=peers_plan(config),
        notes=resolution.notes,
    )


def _kv_formats(resolution: Resolution) -> list[KvFormatPlan]:
    config = resolution.config
    return [
        KvFormatPlan(
            name,
            config.model.dtype if name == "model" else name,
            each.bytes_per_token,
            each.num_blocks(config.cache.memory_bytes) * each.bytes_per_block // each.bytes_per_token,
        )
        for name, each in resolution.kv_formats.items()
        if each.bytes_per_token
    ]


def _groups(kv: KvSpec, max_model_len: int, step_tokens: int) -> list[GroupPlan]:
    """Count alike groups together."""
    alike: dict[tuple[str, int], list[KvGroup]] = {}
    for group in kv.groups:
        alike.setdefault((group.kind, group.window), []).append(group)
    return [
        GroupPlan(
            kind,
            window,
            len(groups),
            sum(len(group.layers) for group in groups),
            sum(group.most_blocks(max_model_len, kv.block_size, step_tokens) for group in groups),
        )
        for (kind, window), groups in alike.items()
    ]


def _in_words(group: GroupPlan) -> str:
    what = {
        "full": "everything is seen",
        "sliding": f"the last {group.window:,} tokens are seen",
        "chunked": f"a chunk of {group.window:,} tokens is seen",
        "state": "a state is kept",
    }[group.kind]
    layers = f"{group.num_layers} layer{'' if group.num_layers == 1 else 's'}"
    groups = "" if group.num_groups == 1 else f" in {group.num_groups} groups"
    return f"{what} by {layers}{groups}: at most {group.blocks_per_request:,} blocks of a request"


def _format_rows(formats: list[KvFormatPlan]) -> list[tuple[str, str]]:
    """Return a line for each, if there is a choice."""

    def words(kv: KvFormatPlan) -> str:
        fit = f"{kv.num_tokens:>12,} tokens fit" if kv.num_tokens else ""
        return f"{format_size(kv.bytes_per_token):>9} a token {fit}  --kv-cache-dtype {kv.name}"

    return [(f"KV as {each.dtype}", words(each)) for each in formats] if len(formats) > 1 else []


def _layers(model: ModelConfig) -> str | None:
    """Say what a model of the registry is made of."""
    spec = _spec_of(model)
    if spec is None:
        return None
    return f"{len(spec.layers)}: {'; '.join(words for words in describe(spec).values() if words)}"


def _share(config: EngineConfig) -> str | None:
    """Say what a rank has of a model that is divided."""
    spec, share = _spec_of(config.model), share_of(config.executor, 0)
    return None if spec is None or share.is_all else "; ".join(share_in_words(spec, share))


def _stages(config: EngineConfig) -> str | None:
    """Say which layers each stage has."""
    spec, stages = _spec_of(config.model), config.executor.pipeline_parallel_size
    if spec is None or stages == 1:
        return None
    said = [f"{begin} to {end - 1}" for begin, end in stage_layers(spec, stages)]
    return f"layers {', '.join(said)}"


def _spec_of(model: ModelConfig) -> DecoderSpec | None:
    family = FAMILIES.get(model.architecture)
    if model.implementation != "quintet" or family is None:
        return None
    spec = family.read(card_of(model))
    return spec if isinstance(spec, DecoderSpec) else None


def _beside_kv(plan: Plan) -> list[tuple[str, str]]:
    """Return a line for what else computing takes."""
    processes = plan.num_ranks * plan.num_stages
    each = format_size(plan.attention_scratch_bytes // processes)
    divided = f": {each} in each of {processes} processes" if processes > 1 else ""
    whose = ", for each engine" if plan.processes["executor"] > 1 else ""
    rows = (
        ("attention scratch", plan.attention_scratch_bytes, f"for all layers{divided}"),
        ("shared by ranks", plan.shared_bytes, "for what they tell each other"),
    )
    return [(name, f"{format_size(size)} at most, {purpose}{whose}") for name, size, purpose in rows if size]


def _processes(plan: Plan) -> str:
    """Say how many there are of which role."""
    stages = f" of {plan.num_stages} stages" * (plan.num_stages > 1)
    ranks = f" of {plan.num_ranks} ranks" * (plan.num_ranks > 1)
    hosts = f" on {plan.num_hosts} hosts" * (plan.num_hosts > 1)
    of_ranks = {"executor": stages + ranks + hosts}
    said = (f"{role} ×{count}{of_ranks.get(role, '')}" for role, count in plan.processes.items())
    return ", ".join(("supervisor", *said))


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan for human eyes."""
    weights = ", ".join(
        [f"{plan.num_parameters:,} parameters"] * (plan.num_parameters is not None)
        + [f"{format_size(plan.weight_bytes)} on disk" if plan.weight_bytes is not None else "not read"]
    )
    whose = ", for each engine" if plan.processes["core"] > 1 else ""
    if plan.num_ranks > 1:
        each = f"each {plan.kv_ranks}" if plan.kv_ranks > 1 else "each"
        together = " together" * (plan.kv_ranks > 1)
        whose = f", for {each} of {plan.num_ranks} ranks{together}" + (" of an engine" if whose else "")
    rows = [
        ("model", plan.model if plan.model == plan.path else f"{plan.model} ({plan.path})"),
        ("architecture", f"{plan.architecture}, {plan.dtype}, {plan.executor} executor on {plan.device}"),
        (
            "computed by",
            "Quintet's own layers"
            if plan.implementation == "quintet"
            else "transformers' layers over Quintet's KV memory",
        ),
        *([("layers", plan.layers)] if plan.layers is not None else []),
        *([("each rank has", plan.share)] if plan.share is not None else []),
        *([("stages have", plan.stages)] if plan.stages is not None else []),
        ("quantization", plan.quantization),
        *([("activations", plan.activation_dtype)] if plan.activation_dtype != "auto" else []),
        *([("checkpoint", plan.checkpoint_format)] if plan.checkpoint_format is not None else []),
        ("weights", weights),
        ("memory available", format_size(plan.available_memory_bytes)),
        ("KV per token", format_size(plan.kv_bytes_per_token)),
        *_format_rows(plan.kv_formats),
        *(("KV group", _in_words(group)) for group in plan.kv_groups if len(plan.kv_groups) > 1),
        (
            "KV memory",
            f"{format_size(plan.kv_memory_bytes)}: {plan.num_blocks:,} blocks of {plan.block_size} tokens"
            + (
                f", {plan.num_blocks * plan.block_size:,} tokens in all"
                if [(group.kind, group.num_groups) for group in plan.kv_groups] == [("full", 1)]
                else ""
            )
            + whose
            if plan.kv_memory_bytes
            else "what the GPU has left when the model is loaded",
        ),
        *rows_of(plan.kv_disk, plan.kv_store, plan.kv_peers, plan.block_size),
        *_beside_kv(plan),
        (
            "requests",
            (
                f"{plan.max_full_length_requests:,} of full length ({plan.max_model_len:,} tokens) at once; "
                if plan.kv_memory_bytes
                else ""
            )
            + f"at most {plan.max_num_seqs} together, {plan.max_num_batched_tokens:,} tokens a step",
        ),
        ("processes", _processes(plan)),
        ("address", f"http://{plan.address}"),
    ]
    return [f"{name:<17} {value}" for name, value in rows] + [f"note: {note}" for note in plan.notes]
