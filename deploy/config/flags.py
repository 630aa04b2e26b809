"""The table of flags: names, types, defaults and help texts.

`Options` is the only declaration of a flag. The command line, the YAML file and ``LLM(**kwargs)`` are read from it
(`quintet.deploy.config.flag_table`). `quintet.deploy.config.rules` checks combinations of values.
"""

# ruff: noqa: RUF009 - `flag` makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quintet.deploy.config.flag import DTYPES, LOAD_FORMATS, QUANTIZATION_ALIASES, count, flag, json_flag
from quintet.wire.config import (
    ActivationDtype,
    ChatContentFormat,
    KvCacheDtype,
    LogitsDtype,
    Quantization,
    Routing,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """User settings, before the model and the machine are inspected."""

    # --- model ---
    model: str | None = flag(
        None,
        "local folder, .gguf file, hub name OWNER/NAME or OWNER/NAME:FILE.gguf, or smollm2",
        "MODEL",
        "the toy model that ships with Quintet",
    )
    tokenizer: str | None = flag(None, "tokenizer folder or hub name", "PATH", "the model's tokenizer")
    served_model_name: list[str] = flag(
        [],
        "model names accepted in requests, instead of MODEL; responses contain the first",
        "NAME",
        "MODEL as given",
        takes_several=True,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto",
        "data type of weights, activations and KV cache; auto uses the checkpoint's data type",
        aliases=DTYPES,
    )
    max_model_len: int | None = flag(
        None,
        "maximum context length, prompt plus output, in tokens: 8192, 8K (8192), 8k (8000) or auto",
        "TOKENS",
        "the model's maximum, or less if KV cache memory is short",
        read=count,
    )
    load_format: Literal["auto", "dummy"] = flag(
        "auto",
        "auto reads the checkpoint; dummy initializes the weights with seeded random numbers",
        aliases=dict.fromkeys(LOAD_FORMATS, "auto"),
    )
    revision: str | None = flag(None, "branch, tag or commit of the hub model", "NAME", "main")
    tokenizer_revision: str | None = flag(
        None, "branch, tag or commit of the hub tokenizer given by --tokenizer", "NAME", "main"
    )
    hf_overrides: dict[str, Any] = json_flag(
        "JSON object merged into the model's config.json; nested objects are merged too"
    )
    model_impl: Literal["auto", "quintet", "transformers"] = flag(
        "auto",
        "model implementation: quintet, transformers (slower; uses Quintet's paged KV cache), or auto: quintet "
        "where the architecture is supported, else transformers",
        aliases={"vllm": "quintet"},
    )
    runner: Literal["auto", "generate", "pooling"] = flag(
        "auto",
        "pooling: also serve embeddings, of the hidden states of a text's last token, or as the model's files of "
        "sentence-transformers say; auto: only with such files; generate: never",
        aliases={"embed": "pooling", "embedding": "pooling", "none": "generate"},
    )
    pooler_config: dict[str, Any] = json_flag(
        'JSON object with the pooling of embeddings: {"pooling_type": "MEAN", "normalize": false}; implies --runner '
        "pooling"
    )
    lora_modules: list[str] = flag(
        [],
        "LoRA adapters, NAME=PATH each: folders or hub names in the format of PEFT; a request selects one by its "
        "name as the model",
        "NAME=PATH",
        "none",
        takes_several=True,
    )
    trust_remote_code: bool = flag(
        False,
        "allow transformers to execute Python files of the model folder, with the server's permissions; only for "
        "--model-impl transformers or auto",
    )
    quantization: Quantization = flag(
        "none",
        "quantize linear layers at load time: int8, int4 (weight-only) or w8a8; for a quantized checkpoint, the "
        "format is detected, and only its name is accepted",
        aliases=QUANTIZATION_ALIASES,
    )
    activation_dtype: ActivationDtype = flag(
        "auto",
        "CPU only: data type of linear-layer inputs with integer weights; auto uses 16 bits, or the checkpoint's "
        "setting; int8 speeds up prefill and is less exact (docs/quantization.md)",
    )
    logits_dtype: LogitsDtype = flag(
        "float32",
        "data type of logits: float32, or model, which rounds logits to the model's data type as transformers "
        "does",
    )
    packed_cache: str | None = flag(
        None,
        "cache folder for packed weights; the next start maps them into memory instead of packing again",
        "FOLDER",
        "none",
    )
    chat_template: str | None = flag(
        None,
        "Jinja chat template, as a file path or inline text; replaces all templates of the model",
        "PATH",
        "the model's template",
    )
    chat_template_content_format: ChatContentFormat = flag(
        "auto",
        "message content format passed to the chat template: string, openai (list of parts), or auto, detected "
        "from the template (docs/chat-templates.md)",
    )
    tool_call_parser: str = flag(
        "auto",
        "tool call parser (docs/tools.md); none disables parsing; auto detects the format from the chat template",
        "NAME",
    )
    reasoning_parser: str = flag(
        "auto",
        "reasoning parser (docs/tools.md); none disables parsing; auto detects the format from the chat template",
        "NAME",
    )
    reasoning_config: dict[str, Any] = json_flag("reasoning_end_str ends long reasoning")
    enable_auto_tool_choice: bool = flag(
        False,
        "accepted for compatibility with vLLM; tool calls are parsed whenever a tool call parser is set",
    )
    generation_config: str = flag(
        "auto",
        "source of default sampling parameters: auto (the model's generation_config.json), none, or a folder",
        "WHERE",
    )
    override_generation_config: dict[str, Any] = json_flag(
        'JSON object of default sampling parameters that overrides --generation-config, e.g. {"temperature": 0.5}'
    )
    default_chat_template_kwargs: dict[str, Any] = json_flag(
        'JSON object of default chat template arguments; a request can override them, e.g. {"enable_thinking": '
        "false}"
    )
    seed: int = flag(0, "random seed of weights with --load-format dummy")

    # --- network ---
    host: str = flag(
        "127.0.0.1", "address to listen on; 0.0.0.0 accepts connections from the network: also set --api-key"
    )
    port: int = flag(8000, "port to listen on; 0 selects a free port and prints it")
    api_key: list[str] = flag(
        [],
        "API keys that clients must present; accepts several values, and may be repeated",
        "KEY",
        "no authentication",
        takes_several=True,
    )
    admin_key: str = flag(
        "",
        "key for the administrative /kv endpoints; client API keys do not grant access",
        "KEY",
        "only `quintet admin` on this machine has access",
    )
    uds: str = flag("", "Unix domain socket to listen on instead of --host and --port", "PATH", "none")
    ssl_keyfile: str = flag("", "PEM file with the private key of the TLS certificate", "FILE", "none")
    ssl_certfile: str = flag("", "PEM file with the TLS certificate chain; enables HTTPS", "FILE", "HTTP")
    ssl_ca_certs: str = flag(
        "",
        "PEM file with the CA certificates that verify client certificates (mutual TLS)",
        "FILE",
        "no client certificate required",
    )
    allowed_origins: list[str] = flag(
        ["*"],
        "CORS: allowed origin, * for all; repeat for more, or give a JSON list; [] disables CORS",
        "ORIGIN",
        "*",
    )
    allowed_methods: list[str] = flag(
        [], "CORS: allowed method; repeat for more, or give a JSON list", "METHOD", "all"
    )
    allowed_headers: list[str] = flag(
        [], "CORS: allowed request header; repeat for more, or give a JSON list", "HEADER", "all"
    )
    allow_credentials: bool = flag(
        False, "CORS: allow credentials such as cookies, for example for an authenticating proxy"
    )
    enable_force_include_usage: bool = flag(
        False, "send token usage at the end of every stream, regardless of stream_options"
    )
    return_tokens_as_token_ids: bool = flag(
        False, "return log-probability tokens as token_id:7 by default; a request can override it"
    )
    middleware: list[str] = flag(
        [],
        "import path of ASGI middleware: a class, or a coroutine function of request and call_next; repeat for "
        "more; the last one is outermost",
        "NAME",
        "none",
    )
    root_path: str = flag(
        "", "path prefix added by a reverse proxy, whether or not the proxy strips it", "PATH", "none"
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False, "enable GET /tokenizer_info: tokenizer configuration and chat template"
    )
    disable_fastapi_docs: bool = flag(False, "do not serve /docs and /openapi.json")
    max_logprobs: int = flag(
        20, "maximum number of log-probabilities per token in a request; -1 for the vocabulary size"
    )
    max_body_bytes: int | str = flag("32MiB", "maximum request body size, e.g. 32MiB", "SIZE", "32MiB")
    max_queued_requests: int = flag(
        4096, "maximum number of requests in one frontend; further requests get 429 with Retry-After"
    )
    max_queued_tokens: int = flag(
        1 << 23,
        "maximum queued prompt plus pending output tokens in one frontend; further requests get 429 with "
        "Retry-After",
        "TOKENS",
    )
    stream_grace: float = flag(
        30.0,
        "time that a streamed request stays paused after its client disconnects, so that the client can resume "
        "it; 0 also disables event ids",
        "SECONDS",
    )
    response_store: str | None = flag(
        None,
        "SQLite file for stored /v1/responses, which persist across restarts; must not be shared between servers",
        "PATH",
        "a file in the run folder, deleted at exit",
    )
    response_store_entries: int = flag(10_000, "maximum number of stored responses; 0 disables the store")
    response_store_size: int | str = flag(
        "256MiB", "maximum total size of stored responses, e.g. 1GiB", "SIZE", "256MiB"
    )
    response_store_hours: float = flag(24.0, "response TTL after last use", "HOURS")
    keep_alive_interval: float = flag(
        15.0, "interval of SSE keep-alive comments in an idle stream; 0 disables them", "SECONDS"
    )
    write_timeout: float = flag(
        60.0,
        "time a client may take to read pending response bytes before its connection is closed",
        "SECONDS",
    )
    header_timeout: float = flag(20.0, "time a client may take to send the request headers", "SECONDS")
    log_requests: bool = flag(False, "log one line per request")
    enable_prompt_embeds: bool = flag(
        False, "accept prompt embeddings in completions: safetensors, base64-encoded"
    )
    trust_request_chat_template: bool = flag(
        False, "accept chat templates in requests; only for trusted clients, because a template is a program"
    )

    # --- scheduling ---
    max_num_seqs: int = flag(256, "maximum number of running requests")
    max_num_batched_tokens: int | None = flag(
        None,
        "maximum number of tokens per step",
        "TOKENS",
        "2048, on a GPU 8192, or the minimum that other flags require",
        read=count,
    )
    enable_chunked_prefill: bool = flag(
        True, "split prefill of long prompts into chunks, batched with decode steps of other requests"
    )
    long_prefill_token_threshold: int = flag(
        0, "maximum tokens of one prompt per step while other requests wait; 0 for no limit", "TOKENS"
    )
    step_target_ms: int | None = flag(
        None,
        "approximate latency target of a step that mixes prefill and decode, with many running requests; two "
        "thirds of it with few; 0 for no target",
        "MS",
        "300 on a CPU, 0 elsewhere and for LLM(...)",
    )
    scheduling_policy: Literal["fcfs", "priority", "longest", "latest"] = flag(
        "fcfs",
        "order of waiting requests: fcfs (arrival), priority (lowest `priority` value first), longest (largest "
        "`max_tokens` first, which ends a batch soonest), latest (newest first among each 32 arrivals)",
        default_text="fcfs; longest for LLM(...)",
    )
    max_steps_in_flight: int = flag(
        2,
        "maximum number of steps in flight: 1 schedules synchronously, 2 schedules a step while the previous one "
        "executes",
    )
    speculative_config: str | None = flag(
        None,
        'speculative decoding, which changes no output (docs/speculative-decoding.md): {"method": "suffix"}, '
        '{"method": "ngram", "num_speculative_tokens": 4}, or a draft model or head, {"method": "eagle3", '
        '"model": MODEL, "num_speculative_tokens": 4}; on a GPU, see --batch-invariant',
        "JSON",
    )
    per_request_spec_decode_metrics: Literal["none", "summary"] = flag(
        "none", "summary: responses report the draft tokens of their request in metrics.speculative_decoding"
    )
    deadline_admission: bool = flag(
        True, "reject a request at admission if it cannot meet its deadline at the measured throughput"
    )
    audit: bool = flag(False, "check all scheduler invariants after every step; slow, for debugging")

    # --- memory ---
    kv_cache_memory: int | str | None = flag(
        None, "KV cache memory, e.g. 2GiB", "SIZE", "a share of free memory"
    )
    kv_cache_memory_share: float | None = flag(
        None,
        "share of the memory left after loading weights that the KV cache uses",
        "SHARE",
        "enough for four sequences of --max-model-len, or 0.125 if that is more; at most 0.4",
    )
    gpu_memory_utilization: float = flag(
        0.92, "GPU only: share of device memory for weights, activations and KV cache together", "SHARE"
    )
    kv_cache_dtype: KvCacheDtype = flag(
        "auto",
        "data type of the KV cache: model (the model's), int8 (CPU) and fp8 (about twice the tokens, slightly "
        "less exact), int4 (CPU; three times the tokens, measurable loss), auto (fp8 or int8 if the checkpoint "
        "says so, else model)",
        aliases={
            **dict.fromkeys(("fp8_e4m3", "fp8_inc"), "fp8"),
            **{f"{name}_per_token_head": name for name in ("int8", "int4")},
        },
    )
    swap_space: float | None = flag(
        None,
        "host memory for swapped-out KV blocks of preempted requests; they are swapped in where that is faster "
        "than recomputation",
        "GIB",
        "4 on a GPU, at most a quarter of free memory; 0 on a CPU",
    )
    kv_transfer_config: dict[str, Any] = json_flag(
        "KV back ends host, disk, peers and store, with the settings of the following flags (docs/kv.md), e.g. "
        '{"disk": {"folder": "/var/cache/quintet", "size": "20GiB"}}'
    )
    kv_disk: str | None = flag(
        None,
        "CPU only: folder of the disk KV cache, which persists across restarts (docs/kv.md); protect it like the "
        "prompts",
        "FOLDER",
        "nowhere",
    )
    kv_disk_size: int | str | None = flag(
        None,
        "maximum size of the disk KV cache per engine, e.g. 20GiB; evicts least recently used blocks",
        "SIZE",
        "8GiB",
    )
    kv_store: str | None = flag(
        None,
        "CPU only: KV store shared between servers (docs/shared.md): file:///dev/shm/NAME for servers of one "
        "machine, s3://BUCKET/PREFIX and other fsspec URLs (quintet[store]), or an installed connector; protect "
        "it like the prompts",
        "URL",
        "none",
    )
    kv_store_size: int | str | None = flag(
        None,
        "maximum total size of a file: KV store, e.g. 20GiB; evicts least recently used blocks",
        "SIZE",
        "8GiB",
    )
    kv_events_config: str | None = flag(
        None,
        'publish KV cache events over ZeroMQ in vLLM\'s format (docs/kv.md), e.g. {"enable_kv_cache_events": true,'
        ' "endpoint": "tcp://127.0.0.1:5557"}',
        "JSON",
        "no events",
    )
    role: Literal["none", "prefill", "decode", "both"] = flag(
        "none",
        "CPU only: role in disaggregated prefill (docs/disaggregation.md): prefill computes prompts and offers their KV, "
        "decode fetches KV, both does both",
    )
    kv_peer_listen: str | None = flag(
        None,
        "address that offers KV to other servers and that they can reach; engine i uses port + i; a non-loopback "
        "address requires --kv-peer-key",
        "HOST:PORT",
        "127.0.0.1:5600",
    )
    kv_peers: list[str] = flag(
        [],
        "host or network, e.g. 10.0.0.0/24, that KV may be fetched from; repeat for more",
        "HOST",
        "this machine",
    )
    kv_peer_key: str | None = flag(
        None,
        "file with a shared secret of at least 32 bytes, the same on all servers; encrypts and authenticates KV "
        "transfer",
        "FILE",
        "a key of this user",
    )
    kv_peer_memory: int | str | None = flag(
        None, "maximum memory for offered KV per engine; evicts least recently used blocks", "SIZE", "1GiB"
    )
    block_size: int | None = flag(
        None, "tokens per KV block", default_text="16, or more for models with recurrent state"
    )
    enable_prefix_caching: bool = flag(True, "reuse KV blocks of requests with the same prefix")

    # --- device ---
    executor: Literal["auto", "torch", "mock"] = flag(
        "auto",
        "torch, or mock, which returns deterministic tokens without weights, to measure the other processes; auto"
        " is torch",
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "device that runs the model; auto selects a GPU if present"
    )
    threads: int = flag(
        0,
        "compute threads per rank; 0 uses every usable core, except one in eight on machines with 8 or more",
    )
    pin_threads: bool = flag(False, "pin each compute thread to one core; for dedicated machines")
    batch_invariant: bool = flag(
        False,
        "GPU only: batch-invariant kernels, bit-identical results regardless of batch composition, at some cost "
        "in speed; a CPU is always batch-invariant",
    )
    enforce_eager: bool = flag(False, "GPU only: disable CUDA graphs")
    allow_torch_kernels: bool = flag(
        False,
        "GPU only: fall back to slow torch operators if the CUDA kernels cannot be loaded; otherwise the server "
        "does not start",
    )
    attention_backend: str = flag(
        "auto",
        "GPU only: attention backend of prefill: auto, quintet, torch, flashinfer, or a registered name",
        "NAME",
    )
    step_ms: float = flag(0.0, "mock executor only: duration of a step", "MS")
    mock_script: str | None = flag(
        None,
        "mock executor only: JSON file of scripted responses for client tests, a list of objects with after and "
        "say",
        "FILE",
    )

    # --- processes ---
    frontends: int = flag(1, "number of HTTP frontend processes, which share the port")
    tokenizers: int = flag(1, "number of tokenizer processes")
    detokenizers: int = flag(1, "number of detokenizer processes")
    data_parallel_size: int = flag(
        1,
        "number of data-parallel engines, each a core and an executor with the whole model; memory and CPU cores "
        "are divided among them, and each has its own GPUs",
        "ENGINES",
    )
    tensor_parallel_size: int = flag(
        1,
        "number of tensor-parallel ranks; each is a process with a shard of every layer and of the KV cache, on "
        "its own CPU cores or GPU",
        "RANKS",
    )
    pipeline_parallel_size: int = flag(
        1,
        "number of pipeline stages; each is a group of --tensor-parallel-size ranks with a share of the layers",
        "STAGES",
    )
    decode_context_parallel_size: int = flag(
        1,
        "CPU only: number of ranks that share one KV cache instead of duplicating it, for models with fewer KV "
        "heads than ranks or with latent attention",
        "RANKS",
    )
    nnodes: int = flag(
        1,
        "number of hosts of a multi-host model; stages, or the ranks of a single stage, are divided evenly; "
        "--node-rank 0 serves HTTP, the other hosts run --headless",
        "HOSTS",
    )
    node_rank: int = flag(0, "rank of this host, from 0", "HOST")
    headless: bool = flag(
        False,
        "worker host of a multi-host model: connects to --master-addr for its configuration; only MODEL, "
        "--group-key, --threads, --packed-cache and --log-level apply",
    )
    distributed_executor_backend: Literal["mp", "ray"] = flag(
        "mp",
        "launcher of the other hosts: mp (start them manually) or ray (this host starts them in its Ray cluster, "
        "with a generated group key)",
        aliases={"uni": "mp"},
    )
    master_addr: str | None = flag(
        None,
        "address or name on which host 0 listens for the other hosts",
        "ADDRESS",
        "127.0.0.1; with ray, this node's Ray address",
    )
    master_port: int = flag(29501, "port on which host 0 listens for the other hosts", "PORT")
    group_key: str | None = flag(
        None,
        "file with a shared secret of at least 32 bytes, the same on all hosts; encrypts and authenticates the "
        "links between hosts",
        "FILE",
        "none",
    )
    layout_invariant: bool = flag(
        False,
        "CPU only: bit-identical results with 1, 2, 4 or 8 ranks and any number of stages, as far as the model "
        "can be divided; requests can then resume on another layout",
    )
    enable_expert_parallel: bool = flag(
        False, "expert parallelism: each rank holds whole experts instead of a slice of every expert"
    )
    enable_eplb: bool = flag(
        False, "expert-parallel load balancing: replicate the most used experts on less loaded ranks"
    )
    eplb_config: str | None = flag(
        None,
        'EPLB settings: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8}',
        "JSON",
    )
    routing: Routing = flag(
        "prefix",
        "load balancing policy across engines: prefix (prefix affinity and load), load (least load), session "
        "(X-Session-Id header, session_id or user), round-robin",
    )
    standby: bool = flag(
        True, "keep a standby tokenizer and detokenizer process, which take over at once when one fails"
    )
    boot_timeout: float = flag(600.0, "maximum time until all processes are ready", "SECONDS")
    max_restarts: int | None = flag(
        None,
        "restarts of one process within a minute; one more failure stops the server",
        "COUNT",
        "5; 12 for the executor",
    )
    drain_timeout: float = flag(
        30.0, "time that requests in flight may take to finish after SIGTERM", "SECONDS"
    )
    stall_timeout: float = flag(
        10.0, "time without a heartbeat or progress before a process is restarted", "SECONDS"
    )
    trace: str | None = flag(
        None,
        "folder where each process writes its trace at exit; `quintet trace FOLDER` reads it",
        "FOLDER",
        "none",
    )
    record: str | None = flag(
        None,
        "folder where each process records its messages, including prompts and outputs, for `quintet replay`",
        "FOLDER",
        "none",
    )
    record_mb: int = flag(
        512, "maximum size of one process's recording; the oldest part is overwritten", "MB"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = flag("INFO", "minimum level of log lines")
