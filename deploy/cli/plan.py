"""``quintet plan``: shows the configuration that `quintet serve` would use, without starting it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec

from quintet.deploy.cli.serve import add_option_arguments, options_of
from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, available_ram_bytes, format_size
from quintet.deploy.config.model.lora import file_bytes
from quintet.deploy.tools.plan_parts import (
    DraftPlan,
    KvDiskPlan,
    disk_plan,
    draft_index_bytes,
    draft_plan,
    draft_rows,
    draft_state_bytes,
    peers_plan,
    rows_of,
    store_plan,
)
from quintet.executor.model_config.describe import describe
from quintet.executor.model_config.fitting import describe_share
from quintet.executor.model_config.share import share_of, stage_layers
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import EngineConfig, KvPeersConfig, KvStoreConfig
from quintet.wire.kv_spec import KvGroup, KvSpec

_EXAMPLES = """\
examples:
  quintet plan                                        the toy model that ships with Quintet
  quintet plan ./my-model --kv-cache-memory 4GiB      number of full-length requests that fit into 4 GiB
  quintet plan Qwen/Qwen3-0.6B --json                 JSON for scripts
"""


class GroupPlan(msgspec.Struct, frozen=True):
    """KV groups of the same kind and window: `quintet.wire.kv_spec.KvGroup`."""

    kind: str
    window: int
    num_groups: int
    num_layers: int
    blocks_per_request: int
    """Maximum number of blocks of a full-length request, over these groups."""


class KvFormatPlan(msgspec.Struct, frozen=True):
    """Memory needs of a KV data type."""

    name: str
    """Value of ``--kv-cache-dtype``."""
    dtype: str
    bytes_per_token: int
    num_tokens: int
    """Number of tokens that fit into `Plan.kv_memory_bytes`; 0 if that is unknown."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved configuration of a server. Sizes in bytes; lengths in tokens."""

    model: str
    path: str
    architecture: str
    implementation: str
    """``quintet`` or ``transformers``."""
    layers: str | None
    """Description of Quintet's layers."""
    num_ranks: int
    kv_ranks: int
    """Ranks that share one KV memory; sizes of KV memory are totals of such a group."""
    num_stages: int
    stages: str | None
    """Layer ranges of pipeline stages."""
    num_hosts: int
    """Number of hosts, with equal numbers of ranks."""
    share: str | None
    """Share of one rank; null for one rank."""
    dtype: str
    quantization: str
    activation_dtype: str
    checkpoint_format: str | None
    """Quantization of the checkpoint, in words; null if it is not quantized."""
    device: str
    executor: str
    num_parameters: int | None
    """From the weight headers, else from ``config.json``; None if only the executor knows it."""
    weight_bytes: int | None
    adapters: dict[str, int]
    """Size of each LoRA adapter's weights in its file, in bytes, by name."""
    max_model_len: int
    kv_bytes_per_token: int
    kv_groups: list[GroupPlan]
    kv_formats: list[KvFormatPlan]
    kv_memory_bytes: int
    block_size: int
    num_blocks: int
    max_full_length_requests: int
    """Number of requests of `max_model_len` tokens that fit into KV memory."""
    max_num_seqs: int
    max_num_batched_tokens: int
    processes: dict[str, int]
    address: str
    available_memory_bytes: int
    attention_scratch_bytes: int
    """Maximum scratch memory of CPU attention, over all processes of an engine."""
    shared_bytes: int
    """Maximum shared memory of an engine's ranks; 0 for one rank."""
    kv_disk: KvDiskPlan | None
    """Disk KV cache; null without one."""
    kv_store: KvStoreConfig | None
    """Shared KV store; null without one."""
    kv_peers: KvPeersConfig | None
    """KV transfer between servers; null without it."""
    draft: DraftPlan | None
    """Draft model; null without one."""
    draft_state_bytes: int
    """Maximum memory of recurrent states before drafts, in addition to KV memory; 0 without drafts or such states."""
    draft_index_bytes: int
    """Maximum memory of prompt lookup or suffix decoding; 0 without them."""
    notes: list[str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        description="Show the configuration and memory of `quintet serve` with the same flags. Reads only headers of weights.",
        usage="quintet plan [MODEL] [--json] [--config FILE] [FLAG ...]",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_option_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    options, notes = options_of(arguments)
    resolution = resolve(options, Path(tempfile.gettempdir()) / "quintet-plan")
    resolution.notes.extend(notes)
    config = resolution.config
    if (config.executor.kind, config.model.implementation) == ("torch", "transformers"):
        from quintet.executor.backends.torch.fallback.boot import (
            check_transformers_model,  # imports transformers: seconds
        )

        check_transformers_model(config)
    plan = make_plan(resolution)
    print(msgspec.json.encode(plan).decode() if arguments.json else "\n".join(plan_lines(plan)))
    return 0


def make_plan(resolution: Resolution) -> Plan:
    config, weights = resolution.config, resolution.weights
    kv, processes = config.model.kv, config.processes
    num_blocks = kv.num_blocks(config.cache.memory_bytes)
    return Plan(
        model=config.model.served_names[0],
        path=config.model.path,
        architecture=config.model.architecture,
        implementation=config.model.implementation,
        layers=_layers(resolution.decoder),
        num_ranks=config.executor.tensor_parallel_size,
        kv_ranks=config.executor.decode_context_parallel_size,
        num_stages=config.executor.pipeline_parallel_size,
        stages=_stages(resolution.decoder, config.executor.pipeline_parallel_size),
        num_hosts=config.executor.num_hosts,
        share=_share(resolution.decoder, config),
        dtype=config.model.dtype,
        quantization=config.executor.quantization,
        activation_dtype=config.executor.activation_dtype,
        checkpoint_format=None if resolution.stored is None else resolution.stored.words,
        device=config.executor.device,
        executor=config.executor.kind,
        num_parameters=resolution.num_parameters,
        weight_bytes=weights.size_bytes if weights else None,
        adapters={adapter.name: file_bytes(adapter) for adapter in config.model.adapters},
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
        draft=draft_plan(config),
        draft_state_bytes=draft_state_bytes(config),
        draft_index_bytes=draft_index_bytes(config),
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
    """Merge groups of the same kind and window."""
    by_kind: dict[tuple[str, int], list[KvGroup]] = {}
    for group in kv.groups:
        by_kind.setdefault((group.kind, group.window), []).append(group)
    return [
        GroupPlan(
            kind,
            window,
            len(groups),
            sum(len(group.layers) for group in groups),
            sum(group.most_blocks(max_model_len, kv.block_size, step_tokens) for group in groups),
        )
        for (kind, window), groups in by_kind.items()
    ]


def _group_text(group: GroupPlan) -> str:
    kind = {
        "full": "full attention",
        "sliding": f"sliding window of {group.window:,} tokens",
        "chunked": f"chunked attention of {group.window:,} tokens",
        "state": "recurrent state",
    }[group.kind]
    layers = f"{group.num_layers} layer{'' if group.num_layers == 1 else 's'}"
    groups = "" if group.num_groups == 1 else f" in {group.num_groups} groups"
    return f"{kind}, {layers}{groups}: at most {group.blocks_per_request:,} blocks per request"


def _format_rows(formats: list[KvFormatPlan]) -> list[tuple[str, str]]:
    """Return a row for each format, if there are several."""

    def described(kv: KvFormatPlan) -> str:
        fit = f"{kv.num_tokens:>12,} tokens fit" if kv.num_tokens else ""
        return f"{format_size(kv.bytes_per_token):>9} per token {fit}  --kv-cache-dtype {kv.name}"

    return [(f"KV as {each.dtype}", described(each)) for each in formats] if len(formats) > 1 else []


def _layers(spec: DecoderSpec | None) -> str | None:
    """Describe the layers of a model, or return None."""
    if spec is None:
        return None
    return f"{len(spec.layers)}: {'; '.join(words for words in describe(spec).values() if words)}"


def _share(spec: DecoderSpec | None, config: EngineConfig) -> str | None:
    """Describe the share of one rank, or return None."""
    share = share_of(config.executor, 0)
    return None if spec is None or share.is_all else "; ".join(describe_share(spec, share))


def _stages(spec: DecoderSpec | None, stages: int) -> str | None:
    """Describe the layer ranges of stages, or return None."""
    if spec is None or stages == 1:
        return None
    ranges = [f"{first} to {end - 1}" for first, end in stage_layers(spec, stages)]
    return f"layers {', '.join(ranges)}"


def _other_memory(plan: Plan) -> list[tuple[str, str]]:
    """Return rows of memory in addition to weights and KV."""
    processes = plan.num_ranks * plan.num_stages
    each = format_size(plan.attention_scratch_bytes // processes)
    divided = f": {each} in each of {processes} processes" if processes > 1 else ""
    per_engine = ", per engine" if plan.processes["executor"] > 1 else ""
    rows = (
        ("attention scratch", plan.attention_scratch_bytes, f"for all layers{divided}"),
        ("draft states", plan.draft_state_bytes, "for the recurrent states before drafts"),
        ("draft indexes", plan.draft_index_bytes, "for drafts from earlier text"),
        ("draft model states", plan.draft.state_bytes if plan.draft else 0, "of its requests"),
        ("shared by ranks", plan.shared_bytes, "for messages between ranks"),
    )
    return [
        (name, f"at most {format_size(size)}, {purpose}{per_engine}") for name, size, purpose in rows if size
    ]


def _processes(plan: Plan) -> str:
    stages = f" of {plan.num_stages} stages" * (plan.num_stages > 1)
    ranks = f" of {plan.num_ranks} ranks" * (plan.num_ranks > 1)
    hosts = f" on {plan.num_hosts} hosts" * (plan.num_hosts > 1)
    of_ranks = {"executor": stages + ranks + hosts}
    counts = (f"{role} ×{count}{of_ranks.get(role, '')}" for role, count in plan.processes.items())
    return ", ".join(("supervisor", *counts))


def plan_lines(plan: Plan) -> list[str]:
    weights = ", ".join(
        [f"{plan.num_parameters:,} parameters"] * (plan.num_parameters is not None)
        + [f"{format_size(plan.weight_bytes)} on disk" if plan.weight_bytes is not None else "not read"]
    )
    owner = ", per engine" if plan.processes["core"] > 1 else ""
    if plan.num_ranks > 1:
        group = f"group of {plan.kv_ranks}" if plan.kv_ranks > 1 else "rank"
        owner = f", per {group} ({plan.num_ranks} ranks)" + (" of an engine" if owner else "")
    rows: list[tuple[str, str | None]] = [
        ("model", plan.model if plan.model == plan.path else f"{plan.model} ({plan.path})"),
        ("architecture", f"{plan.architecture}, {plan.dtype}, {plan.executor} executor on {plan.device}"),
        (
            "implementation",
            "quintet" if plan.implementation == "quintet" else "transformers, with Quintet's paged KV cache",
        ),
        ("layers", plan.layers),
        ("per rank", plan.share),
        ("stages", plan.stages),
        ("quantization", plan.quantization),
        ("activations", plan.activation_dtype if plan.activation_dtype != "auto" else None),
        ("checkpoint", plan.checkpoint_format),
        ("weights", weights),
        *(("LoRA adapter", f"{name}: {format_size(size)} on disk") for name, size in plan.adapters.items()),
        *draft_rows(plan.draft, plan.num_ranks, plan.num_stages, plan.num_hosts),
        ("memory available", format_size(plan.available_memory_bytes)),
        ("KV per token", format_size(plan.kv_bytes_per_token)),
        *_format_rows(plan.kv_formats),
        *(("KV group", _group_text(group)) for group in plan.kv_groups if len(plan.kv_groups) > 1),
        (
            "KV memory",
            f"{format_size(plan.kv_memory_bytes)}: {plan.num_blocks:,} blocks of {plan.block_size} tokens"
            + (
                f", {plan.num_blocks * plan.block_size:,} tokens in total"
                if [(group.kind, group.num_groups) for group in plan.kv_groups] == [("full", 1)]
                else ""
            )
            + owner
            if plan.kv_memory_bytes
            else "GPU memory left after loading the model",
        ),
        *rows_of(plan.kv_disk, plan.kv_store, plan.kv_peers, plan.block_size),
        *_other_memory(plan),
        (
            "requests",
            (
                f"{plan.max_full_length_requests:,} of full length ({plan.max_model_len:,} tokens) fit; "
                if plan.kv_memory_bytes
                else ""
            )
            + f"at most {plan.max_num_seqs} running, {plan.max_num_batched_tokens:,} tokens per step",
        ),
        ("processes", _processes(plan)),
        ("address", f"http://{plan.address}"),
    ]
    lines = [f"{name:<17} {value}" for name, value in rows if value is not None]
    return lines + [f"note: {note}" for note in plan.notes]
