"""Resolved configuration: created once by the supervisor, written to a file, read by every process, never changed.

Parsing of flags and model folders is in ``deploy/config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from quintet.wire.kv_events import KvEventsConfig
from quintet.wire.kv_spec import KvSpec
from quintet.wire.model_files import AdapterConfig
from quintet.wire.pooling import PoolingConfig

Quantization = Literal[
    "none", "int8", "int4", "w8a8", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes",
    "modelopt", "auto-round", "quark", "gguf", "hqq", "squeezellm", "torchao", "bitnet",
]  # fmt: skip
"""Weight format of linear layers, converted at load or as in the checkpoint: ``docs/quantization.md``."""

ActivationDtype = Literal["auto", "int8"]
"""Quantization of the inputs of integer-weight layers: as the checkpoint says (or 16 bits), or int8.

The output layer and MoE routers are excluded.
"""

LogitsDtype = Literal["float32", "model"]
"""Dtype of logits: float32 sums of the output layer, or rounded to the model's dtype, as transformers does."""

ModelImpl = Literal["quintet", "transformers"]
"""Implementation of the model's layers: Quintet's, or transformers' over Quintet's KV memory."""

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per activation, and per weight that is not packed."""

KvFormat = Literal["model", "int8", "int4", "fp8"]
"""Format of keys and values in memory: ``model`` is the model's dtype; int8 and int4 are CPU only; fp8 is e4m3."""

KvCacheDtype = Literal["auto", KvFormat, Dtype]
"""Value of the flag: ``auto`` uses the checkpoint's setting, else the model's dtype, which may also be named."""


Routing = Literal["round-robin", "load", "prefix", "session"]
"""Load balancing of a frontend over engines: ``docs/replicas.md``."""

CallIds = Literal["random", "short", "numbered"]
"""Format of tool call ids: any, nine letters and digits (Mistral), or ``functions.<name>:<number>`` (Kimi)."""


ChatContentFormat = Literal["auto", "string", "openai"]
"""Format of message contents in chat templates: text, a list of parts, or detected from the template's syntax tree."""


class ThinkMarks(msgspec.Struct, frozen=True):
    """Delimiters of reasoning, for grammars that constrain the text after it."""

    opens: list[str]
    closes: list[str]
    begins_inside: bool = False
    """Output starts with reasoning unless the prompt says otherwise."""
    answer: str = ""
    """Prefix of the content, after reasoning or without it."""
    ending: str = ""
    """Text before the closing mark of a reasoning that ends at its budget."""
    breaks: list[str] = []
    """Texts that also end reasoning and belong to the content."""


class ForcedCalls(msgspec.Struct, frozen=True):
    """Format of forced tool calls, as the model would write them: a list of calls with JSON."""

    reader: str
    """Name of the parser for these calls."""
    call_begin: str
    name_end: str
    call_end: str
    separator: str = "\n"
    begin: str = ""
    """Before the first call."""
    end: str = ""
    """After the last call."""
    is_single: bool = False
    """An answer has at most one call."""


class ParsersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Output parsing of chats, unless a request overrides it."""

    reasoning: str = ""
    """Name of the reasoning parser; "" for none."""
    tools: str = ""
    """Name of the tool parser; "" for none."""
    needs_schemas: bool = False
    """The tool parser needs the tools' schemas."""
    call_ids: CallIds = "random"
    thinks: ThinkMarks | None = None
    """Set if there is a reasoning parser."""
    forced: ForcedCalls = ForcedCalls(
        "hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
    )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and those of its numbers that processes other than the executor need."""

    path: str
    """Local folder with ``config.json``, weights and tokenizer files."""
    tokenizer_path: str
    """Local folder with ``tokenizer.json`` and ``tokenizer_config.json``."""
    served_names: list[str]
    """Model names accepted in requests; answers contain the first one."""
    architecture: str
    """First of the config's ``architectures``, e.g. ``LlamaForCausalLM``."""
    hf_config: str = "{}"
    """Text of the folder's ``config.json``. The executor uses it at each start, even if the folder changes meanwhile."""
    implementation: ModelImpl = "quintet"
    trust_remote_code: bool = False
    """Allow transformers to execute Python files of the folder."""
    dtype: Dtype
    vocab_size: int
    embedding_width: int = 0
    """Width of a token embedding; 0 with the transformers implementation."""
    max_model_len: int
    eos_token_ids: list[int]
    kv: KvSpec
    generation_defaults: dict[str, float | int] = {}
    """Sampling defaults of the model's ``generation_config.json``, by their names in `SamplingParams`."""
    chat_templates: dict[str, str] = {}
    """Text of each template by name: the one given by flag as ``default``, or those of the model's folder."""
    chat_template_content_format: ChatContentFormat = "auto"
    parsers: ParsersConfig = ParsersConfig()
    pooling: PoolingConfig | None = None
    """None if the server has no endpoints of embeddings."""
    adapters: list[AdapterConfig] = []
    """LoRA adapters, which requests select by their names."""


class KvDiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Disk tier for KV blocks. Sizes are per engine, counted per KV memory of an executor."""

    folder: str
    """Each engine has separate files in it."""
    size_bytes: int
    """Bytes of blocks, per engine."""
    staging_bytes: int
    """Host memory for reads, per engine."""


class KvStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Store of KV blocks shared by several servers."""

    url: str
    """Address of the store; the scheme names a connector."""
    size_bytes: int = 0
    """Total size of the store, over all models; 0 if its owner limits it."""
    waiting_bytes: int
    """Host memory for copies that wait to be stored, per engine; copies are of whole blocks."""
    staging_bytes: int
    """Host memory for fetches, per engine; per KV memory as in `KvDiskConfig`."""


DisaggregationRole = Literal["prefill", "decode", "both"]
"""Role of a server in disaggregated prefill and decode: ``docs/disaggregation.md``."""


class KvPeersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Exchange of KV blocks with other servers. Sizes as in `KvDiskConfig`."""

    role: DisaggregationRole
    listen: str = ""
    """``host:port`` where engine 0 offers blocks; each further engine uses the next port. "" for none."""
    allowed: list[str] = []
    """Hosts and networks from which blocks may be fetched."""
    key_file: str = ""
    """File with the key that all servers share."""
    offered_bytes: int = 0
    """Host memory for offered blocks, per engine."""
    staging_bytes: int = 0
    """Host memory for fetches, per engine."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory."""

    memory_bytes: int
    """Upper bound for KV tensors, per rank, or per group of ranks that share one KV memory.

    The executor reports the real size as `Capacity`. 0: the rest of ``gpu_memory_utilization`` after the model was
    loaded and run.
    """
    gpu_memory_utilization: float = 0.92
    """Maximum share of a GPU's memory for weights, working memory and KV together."""
    enable_prefix_caching: bool = True
    dtype: KvFormat = "model"
    """Number format of keys and values."""
    swap_bytes: int = 0
    """Host memory for KV of preempted requests, counted like ``memory_bytes``; 0: they are recomputed."""
    num_parts: int = 1
    """KV shards of an executor: each holds the KV heads of its ranks for every block (`ExecutorConfig.num_kv_memories`)."""
    disk: KvDiskConfig | None = None
    """Disk tier; None disables it."""
    store: KvStoreConfig | None = None
    """Shared store; None disables it."""
    peers: KvPeersConfig | None = None
    """KV exchange with other servers; None disables it."""
    events: KvEventsConfig | None = None
    """KV events; None disables them."""

    @property
    def remote_tiers(self) -> list[KvDiskConfig | KvPeersConfig | KvStoreConfig]:
        """Sections of the configured KV back ends, except host memory."""
        return [tier for tier in (self.disk, self.peers, self.store) if tier is not None]


MAX_DRAFTS = 32
"""Maximum draft tokens of a row in one step."""


class DraftModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller model that proposes draft tokens."""

    model: ModelConfig
    """Its ``kv`` has one group: a block holds the same tokens as the served model's block of the same id. No states."""
    group: int
    """The served model's group with full attention; the draft model uses its block table."""
    quantization: Quantization = "none"
    weight_bytes: int = 0
    """Approximate memory of the weights."""
    aux_layers: list[int] = []
    """Of a draft head: layers of the served model after which it reads hidden states."""
    states: KvSpec | None = None
    """Layers with recurrent states, if any, in memory of their own: an empty group in place of ``model.kv``'s, then theirs."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: drafts that the model verifies. Outputs are the same without it."""

    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"] = "ngram"
    """``ngram``: the tokens after the last earlier occurrence of the newest tokens (prompt lookup). ``suffix``: the most
    frequent continuation of the newest tokens, in the request and in earlier outputs. ``draft_model``: tokens of a smaller
    model. ``eagle``, ``eagle3``, ``medusa``, ``mtp``: of a head over hidden states of the served model.
    """
    num_speculative_tokens: int = 4
    """Maximum draft tokens of a request in one step."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    """Minimum and maximum number of newest tokens that must occur earlier."""
    suffix_decoding_max_tree_depth: int = 24
    """Maximum of matched tokens plus drafts."""
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_corpus_tokens: int = 1_000_000
    """Limits on the cache of earlier outputs; at either, the oldest output is evicted."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Maximum drafts for each matched token."""
    suffix_decoding_min_token_prob: float = 0.1
    """Minimum estimated probability of a draft."""
    draft: DraftModelConfig | None = None
    """Set if the method is ``draft_model``, or one with a head."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of the core."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fcfs", "priority", "longest", "latest"] = "fcfs"
    """First come first served; lowest priority number first; most remaining outputs first; latest arrival first,
    within groups.
    """
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt in one step while other requests are live; 0 means no limit."""
    step_target_ms: int = 0
    """Target time in milliseconds of a step with prefill while others decode; 0 means no target."""
    resume_grace_s: float = 30.0
    """TTL in seconds of a streamed request after its client disconnected; 0 disables resumption."""
    max_steps_in_flight: int = 2
    """Plans that may be in flight: 1 is synchronous, 2 overlaps planning with the device."""
    stages: int = 1
    """Pipeline stages. So many steps are computed at once; no two of them draw for the same request."""
    deadline_admission: bool = True
    """Reject a request at once when the measured speed predicts that it misses its deadline."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; None disables it."""
    audit: bool = False
    """Check every invariant after every step, and send table checksums: for debugging."""


class EplbConfig(msgspec.Struct, frozen=True):
    """Expert parallel load balancing: copies of hot experts on other ranks."""

    window_size: int = 1000
    """Averaging window of expert loads, in steps."""
    step_interval: int = 3000
    """Steps between rebalancing."""
    num_redundant_experts: int = 0
    """Copies per layer, over all ranks of a stage."""


class HostsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that compute one model together, each with some of its stages or ranks; this one is the first."""

    count: int
    address: str  # host:port where the first one listens
    key_file: str


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Executor and device."""

    kind: Literal["torch", "mock"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy`` fills the weights with seeded random numbers instead of reading them."""
    quantization: Quantization = "none"
    """Weight format of linear layers after loading."""
    activation_dtype: ActivationDtype = "auto"
    """Quantization of the inputs of integer-weight linear layers."""
    logits_dtype: LogitsDtype = "float32"
    """Dtype of the output layer's sums."""
    packed_cache: str | None = None
    """Folder of files with packed weights, read instead of packing again; None for no such files."""
    threads: int = 0
    """Compute threads per rank; 0 lets the executor choose."""
    tensor_parallel_size: int = 1
    """Tensor parallel ranks: processes that each compute a share of every layer and hold that share of weights and KV."""
    pipeline_parallel_size: int = 1
    """Pipeline stages: groups of ranks that hold some of the layers and pass on hidden states."""
    decode_context_parallel_size: int = 1
    """Number of adjacent ranks that share one KV memory instead of each having a copy."""
    expert_parallel: bool = False
    """Ranks hold whole experts instead of columns of every expert."""
    eplb: EplbConfig | None = None
    """Copies of hot experts on other ranks; None disables them."""
    sum_leaves: int = 1
    """Leaves of the summation tree over ranks, independent of their number; 1: one leaf per rank."""
    hosts: HostsConfig | None = None
    """Machines of the stages, or of the ranks of a single stage; None: all on this one."""
    has_own_cores: bool = False
    """Each compute thread of all ranks has a core; determined by the process that assigns them."""
    pin_threads: bool = False
    """Pin each compute thread to one core."""
    seed: int = 0
    batch_invariant: bool = False
    """GPU: make a request's bits independent of the rest of the batch."""
    enforce_eager: bool = False
    """GPU: disable CUDA graphs."""
    allow_torch_kernels: bool = False
    """GPU: compute with torch operators where Quintet's kernels cannot be loaded."""
    attention_backend: str = "auto"
    """GPU: attention implementation for prefill; see ``executor/backends/cuda/attention``."""
    step_ms: float = 0.0
    """Mock only: duration of a step."""
    mock_script: str | None = None
    """Mock only: a file of answers (``executor/mock.py``)."""
    weight_bytes: int = 0
    """Approximate memory of the weights, per rank; 0 where none are read."""
    shared_bytes: int = 0
    """Maximum memory shared by all ranks: sums, hidden states, logits; 0 with one rank."""

    @property
    def num_ranks(self) -> int:
        """Processes of an executor: of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_kv_memories(self) -> int:
        """KV shards of an executor, each with all blocks, and with the KV heads of one rank, or of several that share it."""
        return self.tensor_parallel_size // self.decode_context_parallel_size

    @property
    def num_hosts(self) -> int:
        """Machines of an executor, each with equally many ranks."""
        return 1 if self.hosts is None else self.hosts.count

    @property
    def ranks_per_host(self) -> int:
        """Processes of an executor on one machine."""
        return self.num_ranks // self.num_hosts


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    admin_key: str = ""
    """Key for admin paths, in addition to the one in the run folder; "" for none."""
    uds: str = ""
    """Path of a Unix socket to listen on instead of host and port; "" for none."""
    allowed_origins: list[str] = []
    allowed_methods: list[str] = []
    allowed_headers: list[str] = []
    """Empty lists of methods or headers allow all."""
    allow_credentials: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Default arguments of chat templates; a request may override them."""
    force_include_usage: bool = False
    """Every stream ends with its usage."""
    reports_drafts: bool = False
    """Responses report the draft tokens of their request."""
    tokens_as_ids: bool = False
    """Log-probabilities spell tokens as ``token_id:7`` unless a request overrides it."""
    middleware: list[str] = []
    """Dotted names of ASGI middleware around the application, the outermost last."""
    ssl_keyfile: str = ""
    ssl_certfile: str = ""
    """PEM files; without a certificate the server speaks plain HTTP."""
    ssl_ca_certs: str = ""
    """PEM file of the certificate authorities for client certificates; "" requests none."""
    max_body_bytes: int = 32 << 20
    max_queued_requests: int = 4096
    """Maximum queued requests of one frontend; beyond it 429 with Retry-After."""
    max_queued_tokens: int = 1 << 23
    """Maximum queued prompt plus pending output tokens of one frontend; beyond it 429 with Retry-After."""
    routing: Routing = "prefix"
    """Load balancing over engines."""
    max_logprobs: int | None = 20
    """Maximum log-probabilities per token of a request; None: the vocabulary size."""
    keep_alive_s: float = 15.0
    """Seconds of silence after which a stream gets an SSE comment; 0 for never."""
    root_path: str = ""
    log_requests: bool = False
    docs: bool = True
    tokenizer_info: bool = False
    """GET /tokenizer_info returns the tokenizer's configuration."""
    prompt_embeds: bool = False
    """Completions accept prompt embeddings."""
    trust_request_chat_template: bool = False
    """Requests may bring a chat template: a program that runs in the tokenizer, without a time limit."""
    write_timeout_s: float = 60.0
    """Seconds a client may leave an answer unread before its connection is closed."""
    header_timeout_s: float = 20.0
    """Seconds a client may take to send the headers of a request."""
    response_store: str = ""
    """File of stored responses; "" for one in the run folder, deleted with the server."""
    response_store_entries: int = 10_000
    """Maximum number of stored responses; 0 stores none."""
    response_store_bytes: int = 256 << 20
    """Maximum total size of stored responses."""
    response_store_hours: float = 24.0
    """TTL of a stored response in hours after last use."""


class ProcessesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of processes, and their timeouts."""

    frontends: int = 1
    external_frontends: int = 0
    """Slots after the HTTP frontends for processes of the user: the Python API."""
    tokenizers: int = 1
    engines: int = 1
    """Cores, and as many executors: core ``i`` and executor ``i`` are engine ``i``, a whole model with its own KV memory."""
    detokenizers: int = 1
    standby: bool = False
    """Keep a started standby tokenizer and detokenizer for failover."""
    max_restarts: int | None = None
    """Deaths of one slot within a minute after which the server gives up; None: the default of the role."""
    boot_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    heartbeat_s: float = 0.4
    notice_s: float = 1.5
    """Silence, or pending work without progress, for this long is reported as a stall."""
    stall_s: float = 10.0
    """Stall time after which the process is replaced."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration, frozen."""

    run_dir: str
    """Folder of this server's sockets, mode 0700."""
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    executor: ExecutorConfig
    frontend: FrontendConfig
    processes: ProcessesConfig
    log_level: str = "INFO"
    trace: str | None = None
    """Folder for trace spans, written when a process ends; None disables tracing. See ``process/trace.py``."""
    record: str | None = None
    """Folder for recorded messages of every process; None disables recording. See ``process/record.py``."""
    record_bytes: int = 512 << 20
    """Maximum size of one slot's recording; the oldest parts are deleted."""

    @property
    def logits_item_bytes(self) -> int:
        """Size of a logit."""
        return DTYPE_BYTES["float32" if self.executor.logits_dtype == "float32" else self.model.dtype]

    def write(self, path: Path) -> None:
        """Write the configuration as JSON for the child processes."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> EngineConfig:
        """Read the result of `write`."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
