"""The resolved configuration: made once by the supervisor, written to a file, read by every process, never changed.

Each process is handed only the section it needs. Nothing here parses flags or reads a model folder: that is
``deploy/config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from quintet.wire.kv_spec import KvSpec

Quantization = Literal[
    "none", "int8", "int4", "w8a8", "gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes",
    "modelopt", "auto-round", "quark", "gguf", "hqq", "squeezellm", "torchao", "bitnet",
]  # fmt: skip
"""What linear layers are rounded into, or the format in which their checkpoint has them: ``docs/quantization.md``."""

ActivationDtype = Literal["auto", "int8"]
"""What inputs of layers whose weights are integers are rounded to: as the checkpoint says, or 16 bits; or 8 bits, but for the
output layer's and those of routers."""

LogitsDtype = Literal["float32", "model"]
"""Of logits: the sums of the output layer as they are, or rounded to the model's dtype, as transformers' are."""

ModelImpl = Literal["quintet", "transformers"]
"""Whose layers compute a model: ours, or those of transformers over our KV memory."""

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of a number of activations, and of weights that are not packed."""

KvFormat = Literal["model", "int8", "int4", "fp8"]
"""Of keys and values in memory: ``model`` is the model's own; int8 and int4 are of CPUs alone; fp8 is e4m3."""

KvCacheDtype = Literal["auto", KvFormat]
"""As the flag has it: ``auto`` is what the checkpoint says of keys and values, else the model's own."""


Routing = Literal["round-robin", "load", "prefix", "session"]
"""By what a frontend chooses the engine of a request: ``docs/replicas.md``."""

CallIds = Literal["random", "short", "numbered"]
"""Of calls of tools: any, nine letters and digits (Mistral), or ``functions.<name>:<number>`` (Kimi)."""


ChatContentFormat = Literal["auto", "string", "openai"]
"""Of messages in chat templates: text, a list of parts, or what the template's syntax tree tells."""


class ThinkMarks(msgspec.Struct, frozen=True):
    """What stands around reasoning, for those who say what may follow it."""

    opens: list[str]
    closes: list[str]
    begins_inside: bool = False
    """Whether output is reasoning from its first character where the prompt does not say so."""
    answer: str = ""
    """What stands before content, behind reasoning or without any."""
    breaks: list[str] = []
    """What ends reasoning as well, and belongs to what follows."""


class ForcedCalls(msgspec.Struct, frozen=True):
    """How calls are written that a request insists on, as its model would: a list of calls with JSON in them."""

    reader: str
    """Name of the parser that reads them."""
    call_begin: str
    name_end: str
    call_end: str
    separator: str = "\n"
    begin: str = ""
    """Before the first."""
    end: str = ""
    """After the last."""
    is_single: bool = False
    """Whether an answer has one call at most."""


class ParsersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How answers of chats are read, unless a request says otherwise."""

    reasoning: str = ""
    """Name of the reasoning parser; "" for none."""
    tools: str = ""
    """Name of the parser of calls; "" for none."""
    needs_schemas: bool = False
    """Whether it must know the tools' types."""
    call_ids: CallIds = "random"
    thinks: ThinkMarks | None = None
    """Set where there is a reasoning parser."""
    forced: ForcedCalls = ForcedCalls(
        "hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
    )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and the few of its numbers that processes other than the executor need."""

    path: str
    """Local folder with ``config.json``, weights and tokenizer files."""
    tokenizer_path: str
    """Local folder with ``tokenizer.json`` and ``tokenizer_config.json``."""
    served_names: list[str]
    """Names clients may ask for; the first one is echoed in answers."""
    architecture: str
    """First of the model card's ``architectures``, e.g. ``LlamaForCausalLM``."""
    card: str = "{}"
    """Text of the folder's ``config.json``: the executor builds the model from what the others know it by, at each of its
    starts, whatever the folder holds by then."""
    implementation: ModelImpl = "quintet"
    trust_remote_code: bool = False
    """Whether transformers may execute Python files of the folder."""
    dtype: Dtype
    vocab_size: int
    embedding_width: int = 0
    """Numbers of a token's embedding; 0 where the layers are not ours."""
    max_model_len: int
    eos_token_ids: list[int]
    kv: KvSpec
    generation_defaults: dict[str, float | int] = {}
    """Sampling defaults of the model's ``generation_config.json``, by their names in `SamplingParams`."""
    chat_templates: dict[str, str] = {}
    """Text of each template by name: the one given by flag as ``default``, or those of the model's folder."""
    chat_template_content_format: ChatContentFormat = "auto"
    parsers: ParsersConfig = ParsersConfig()


class KvDiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of KV memory that are kept on disk. Sizes are of what each KV memory of an executor has of them."""

    folder: str
    """Each engine has files of its own in it."""
    size_bytes: int
    """Of blocks, for each engine."""
    staging_bytes: int
    """Host memory that blocks are read into, of each engine."""


class KvStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A store of blocks of KV memory that several servers share."""

    url: str
    """Who keeps it, and where: its scheme names a connector."""
    size_bytes: int = 0
    """Of all that is kept there, of whatever model; 0 where its owner bounds it."""
    waiting_bytes: int
    """Host memory for copies of blocks that wait to be kept, of each engine; copies are of whole blocks."""
    staging_bytes: int
    """Host memory that blocks are fetched into, of each engine; of what each KV memory has of them, as in `KvDiskConfig`."""


Role = Literal["prefill", "decode", "both"]
"""What a server does of requests that two servers compute: ``docs/apart.md``."""


class KvPeersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of KV memory that go to other servers, and come from there. Sizes are as of `KvDiskConfig`."""

    role: Role
    listen: str = ""
    """``host:port`` where engine 0 offers blocks, and each further one at the next port; "" where none are offered."""
    allowed: list[str] = []
    """Hosts, and networks, that blocks are fetched from."""
    key_file: str = ""
    """Shared by all servers; "" for none, on one machine."""
    offered_bytes: int = 0
    """Host memory for blocks that are offered, of each engine."""
    staging_bytes: int = 0
    """Host memory that blocks are fetched into, of each engine."""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where outside routers hear which blocks there are (`quintet.wire.kv_events`)."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Of engine 0; of each further one the next port."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches that are kept for who missed them."""
    hwm: int = 100_000
    """Batches that wait for a subscriber, at most."""
    topic: str = ""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory."""

    memory_bytes: int
    """Upper bound for KV tensors, of each rank, or of those that keep them together; the executor reports what it could really
    take as `Capacity`. 0: what ``gpu_memory_utilization`` leaves, known when the model has been loaded and tried."""
    gpu_memory_utilization: float = 0.92
    """Share of a GPU's memory that weights, working memory and KV may take together."""
    enable_prefix_caching: bool = True
    dtype: KvFormat = "model"
    """Number format of keys and values."""
    swap_bytes: int = 0
    """Host memory for KV of preempted requests, likewise; 0: they are computed again."""
    num_parts: int = 1
    """KV memories of an executor that each have a part of every block; see `ExecutorConfig.num_kv_memories`."""
    disk: KvDiskConfig | None = None
    """Where KV outlives the server; None: nowhere."""
    store: KvStoreConfig | None = None
    """What other servers have computed, too; None: nothing."""
    peers: KvPeersConfig | None = None
    """Which servers share requests with this one; None: none."""
    events: KvEventsConfig | None = None
    """Who hears of blocks; None: nobody."""

    @property
    def leaves(self) -> bool:
        """Whether blocks go to other places than memory."""
        return self.disk is not None or self.peers is not None or self.store is not None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policy of the core."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fcfs", "priority", "longest", "latest"] = "fcfs"
    """First come first served; lowest priority number first; most outputs to go first."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt computed in one step while others wait; 0 means no limit."""
    step_target_ms: int = 0
    """How long a step with prompts in it should take at most while others decode; 0 means no target."""
    resume_grace_s: float = 30.0
    """How long a streamed request is kept for a client that was cut off; 0 for not at all."""
    max_steps_in_flight: int = 2
    """Plans that may be in flight: 1 is synchronous, 2 overlaps planning with the device."""
    stages: int = 1
    """Groups of an executor's processes that a step goes through: so many steps are computed at once, none of which draws for a
    request that another one does."""
    deadline_admission: bool = True
    """Refuse at once what cannot meet its deadline, as the measured pace predicts, rather than let it wait for that."""
    audit: bool = False
    """Check every invariant after every step, and ship table checksums: for debugging."""


class EplbConfig(msgspec.Struct, frozen=True):
    """When experts are copied to ranks that have less to do."""

    window_size: int = 1000
    """Steps over which what is asked of experts is remembered, about."""
    step_interval: int = 3000
    """Steps from one look at the placement to the next."""
    num_redundant_experts: int = 0
    """Places for copies in each layer, of all ranks of a stage together."""


class HostsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Machines that compute one model together, each some of its stages, or ranks; this one is the first."""

    count: int
    address: str  # host:port where the first one listens
    key_file: str


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The device side."""

    kind: Literal["torch", "mock"] = "torch"
    device: Literal["cpu", "cuda"] = "cpu"
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy`` fills the weights with seeded random numbers instead of reading them."""
    quantization: Quantization = "none"
    """Number format that the weights of linear layers get when they are loaded."""
    activation_dtype: ActivationDtype = "auto"
    """What inputs of linear layers are rounded to where weights are integers."""
    logits_dtype: LogitsDtype = "float32"
    """What sums of the output layer are rounded to."""
    packed_cache: str | None = None
    """Folder of files with packed weights, read instead of packing again; None for no such files."""
    threads: int = 0
    """Compute threads, of each rank; 0 lets the executor choose."""
    tensor_parallel_size: int = 1
    """Ranks: processes of an executor that each compute a share of every layer, and hold that much of weights and KV."""
    pipeline_parallel_size: int = 1
    """Stages: groups of as many ranks each, that have some of the layers, and hand on what they compute."""
    decode_context_parallel_size: int = 1
    """So many neighbours among the ranks keep one KV memory together, where each would have a copy of it."""
    expert_parallel: bool = False
    """Whether each of several ranks keeps whole experts, not some columns of each."""
    eplb: EplbConfig | None = None
    """Whether hot ones are copied to other ranks besides; None: no."""
    sum_leaves: int = 1
    """In how many leaves of a tree sums over what ranks divide are added, whatever their number; 1: each rank's part is one."""
    hosts: HostsConfig | None = None
    """The machines that the stages, or the ranks of the only one, are on; None: all on this one."""
    has_own_cores: bool = False
    """Whether each compute thread of all ranks has a core: found out by the process that takes its share of them."""
    pin_threads: bool = False
    """Whether each compute thread stays on one core."""
    seed: int = 0
    batch_invariant: bool = False
    """GPU: give a request the same bits whatever else is in the batch."""
    enforce_eager: bool = False
    """GPU: capture no graphs."""
    allow_torch_kernels: bool = False
    """GPU: compute with torch's operators where Quintet's kernels cannot be loaded."""
    attention_backend: str = "auto"
    """GPU: whose attention computes prompts; see ``executor/backends/cuda/attention``."""
    step_ms: float = 0.0
    """Mock only: how long a step takes."""
    mock_script: str | None = None
    """Mock only: a file of answers (``executor/mock_script.py``)."""
    weight_bytes: int = 0
    """What the weights take in memory, about, of each rank; 0 where none are read."""
    shared_bytes: int = 0
    """What all ranks share, at most: sums, hidden states, logits; 0 where there is one."""

    @property
    def num_ranks(self) -> int:
        """Processes of an executor: of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_kv_memories(self) -> int:
        """KV memories of an executor, each with every block: of one rank, or of some that keep it together."""
        return self.tensor_parallel_size // self.decode_context_parallel_size

    @property
    def num_hosts(self) -> int:
        """Machines that they are on, each with as many."""
        return 1 if self.hosts is None else self.hosts.count

    @property
    def ranks_per_host(self) -> int:
        """Processes of an executor on one machine."""
        return self.num_ranks // self.num_hosts


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: list[str] = []
    admin_key: str = ""
    """For the paths that are for who operates the server, beside the one in the run folder; "" for none."""
    uds: str = ""
    """Path of a Unix socket to listen on instead of host and port; "" for none."""
    allowed_origins: list[str] = []
    allowed_methods: list[str] = []
    """Empty for all there are."""
    allowed_headers: list[str] = []
    """Empty for all."""
    allow_credentials: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of chat templates where a request does not give them."""
    force_include_usage: bool = False
    """Whether every stream ends with its usage."""
    tokens_as_ids: bool = False
    """Whether log-probabilities spell tokens as ``token_id:7`` where a request does not say."""
    middleware: list[str] = []
    """Dotted names of ASGI middleware around the application, the outermost last."""
    ssl_keyfile: str = ""
    ssl_certfile: str = ""
    """PEM files; without a certificate the server speaks plain HTTP."""
    ssl_ca_certs: str = ""
    """PEM file of the authorities that must have signed a client's certificate; "" asks for none."""
    max_body_bytes: int = 32 << 20
    max_queued_requests: int = 4096
    """Requests one frontend holds at most; one more is answered 429 with Retry-After."""
    max_queued_tokens: int = 1 << 23
    """Tokens that the requests of one frontend may owe before the next one is answered 429 with Retry-After: prompts not
    begun, and outputs that may still come."""
    routing: Routing = "prefix"
    """By what the engine of a request is chosen, where there are several."""
    max_logprobs: int | None = 20
    """Log-probabilities that a request may ask for per token; None: as many as there are tokens."""
    keep_alive_s: float = 15.0
    """Seconds of silence after which a stream gets an SSE comment; 0 for never."""
    root_path: str = ""
    log_requests: bool = False
    tokenizer_info: bool = False
    """Whether GET /tokenizer_info tells the tokenizer's configuration."""
    prompt_embeds: bool = False
    """Whether completions may bring a prompt as embeddings."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own template: a program that runs in the tokenizer, without a time limit."""
    write_timeout_s: float = 60.0
    """Seconds a client may leave an answer unread before its connection is closed."""
    header_timeout_s: float = 20.0
    """Seconds a client may take to send the headers of a request."""
    response_store: str = ""
    """File that keeps responses; "" for one in the run folder, which ends with the server."""
    response_store_entries: int = 10_000
    """Responses that are kept at most; 0 keeps none."""
    response_store_bytes: int = 256 << 20
    """What they may hold together."""
    response_store_hours: float = 24.0
    """How long they are kept after they were last gone on with."""


class ProcessesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each process, and how long to wait for them."""

    frontends: int = 1
    external_frontends: int = 0
    """Slots after the HTTP frontends that a process of the user's fills: the Python API."""
    tokenizers: int = 1
    engines: int = 1
    """Cores, and as many executors: core ``i`` and executor ``i`` are engine ``i``, a whole model with KV memory of its own."""
    detokenizers: int = 1
    standby: bool = False
    """Whether a tokenizer and a detokenizer wait, booted, to take over when one dies."""
    max_restarts: int | None = None
    """Deaths of one slot within a minute after which the server gives up; None: as many as fit the role."""
    boot_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    heartbeat_s: float = 0.4
    notice_s: float = 1.5
    """Silence, or work pending without progress, for this long is shown as a stall."""
    stall_s: float = 10.0
    """After so much of it the process is replaced."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, frozen."""

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
    """Folder where every process writes its spans when it ends; None records none. See ``process/trace.py``."""
    record: str | None = None
    """Folder where every process keeps what it was sent and what it sent; None keeps nothing. See ``process/record.py``."""
    record_bytes: int = 512 << 20
    """What the recording of one slot may take; its oldest parts are deleted."""

    @property
    def logits_item_bytes(self) -> int:
        """Size of a logit."""
        return DTYPE_BYTES["float32" if self.executor.logits_dtype == "float32" else self.model.dtype]

    def write(self, path: Path) -> None:
        """Write the configuration as JSON for the child processes."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> EngineConfig:
        """Read what `write` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
