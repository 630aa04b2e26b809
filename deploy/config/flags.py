"""The table of flags: names, types, defaults and help texts.

`Options` is the only declaration of a flag. The command line, the YAML file and ``LLM(**kwargs)`` are read from it
(`quintet.deploy.config.flag_table`). `quintet.deploy.config.rules` checks combinations of values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quintet.deploy.config.flag import DTYPES, LOAD_FORMATS, QUANTIZATION_ALIASES, Flag, count, json_flag
from quintet.wire.config import (
    ActivationDtype,
    ChatContentFormat,
    KvCacheDtype,
    LogitsDtype,
    Quantization,
    Routing,
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User settings, before the model and the machine are inspected."""

    # --- model ---
    model: Annotated[
        str | None,
        Flag(
            "local folder, .gguf file, hub name OWNER/NAME or OWNER/NAME:FILE.gguf, or smollm2",
            "MODEL",
            "the toy model that ships with Quintet",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Flag("tokenizer folder or hub name", "PATH", "the model's tokenizer")
    ] = None
    served_model_name: Annotated[
        list[str],
        Flag(
            "model names accepted in requests, instead of MODEL; responses contain the first",
            "NAME",
            "MODEL as given",
            takes_several=True,
        ),
    ] = []
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Flag(
            "data type of weights, activations and KV cache; auto uses the checkpoint's data type",
            aliases=DTYPES,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag(
            "maximum context length, prompt plus output, in tokens: 8192, 8K (8192), 8k (8000) or auto",
            "TOKENS",
            "the model's maximum, or less if KV cache memory is short",
            read=count,
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Flag(
            "auto reads the checkpoint; dummy initializes the weights with seeded random numbers",
            aliases=dict.fromkeys(LOAD_FORMATS, "auto"),
        ),
    ] = "auto"
    revision: Annotated[str | None, Flag("branch, tag or commit of the hub model", "NAME", "main")] = None
    tokenizer_revision: Annotated[
        str | None, Flag("branch, tag or commit of the hub tokenizer given by --tokenizer", "NAME", "main")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any],
        json_flag("JSON object merged into the model's config.json; nested objects are merged too"),
    ] = {}
    model_impl: Annotated[
        Literal["auto", "quintet", "transformers"],
        Flag(
            "model implementation: quintet, transformers (slower; uses Quintet's paged KV cache), or auto: quintet "
            "where the architecture is supported, else transformers",
            aliases={"vllm": "quintet"},
        ),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Flag(
            "pooling: also serve embeddings, of the hidden states of a text's last token, or as the model's files of "
            "sentence-transformers say; auto: only with such files; generate: never",
            aliases={"embed": "pooling", "embedding": "pooling", "none": "generate"},
        ),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any],
        json_flag(
            'JSON object with the pooling of embeddings: {"pooling_type": "MEAN", "normalize": false}; implies --runner '
            "pooling"
        ),
    ] = {}
    lora_modules: Annotated[
        list[str],
        Flag(
            "LoRA adapters, NAME=PATH each: folders or hub names in the format of PEFT; a request selects one by its "
            "name as the model",
            "NAME=PATH",
            "none",
            takes_several=True,
        ),
    ] = []
    trust_remote_code: Annotated[
        bool,
        Flag(
            "allow transformers to execute Python files of the model folder, with the server's permissions; only for "
            "--model-impl transformers or auto"
        ),
    ] = False
    quantization: Annotated[
        Quantization,
        Flag(
            "quantize linear layers at load time: int8, int4 (weight-only) or w8a8; for a quantized checkpoint, the "
            "format is detected, and only its name is accepted",
            aliases=QUANTIZATION_ALIASES,
        ),
    ] = "none"
    activation_dtype: Annotated[
        ActivationDtype,
        Flag(
            "CPU only: data type of linear-layer inputs with integer weights; auto uses 16 bits, or the checkpoint's "
            "setting; int8 speeds up prefill and is less exact (docs/quantization.md)"
        ),
    ] = "auto"
    logits_dtype: Annotated[
        LogitsDtype,
        Flag(
            "data type of logits: float32, or model, which rounds logits to the model's data type as transformers "
            "does"
        ),
    ] = "float32"
    packed_cache: Annotated[
        str | None,
        Flag(
            "cache folder for packed weights; the next start maps them into memory instead of packing again",
            "FOLDER",
            "none",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Flag(
            "Jinja chat template, as a file path or inline text; replaces all templates of the model",
            "PATH",
            "the model's template",
        ),
    ] = None
    chat_template_content_format: Annotated[
        ChatContentFormat,
        Flag(
            "message content format passed to the chat template: string, openai (list of parts), or auto, detected "
            "from the template (docs/chat-templates.md)"
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        Flag(
            "tool call parser (docs/tools.md); none disables parsing; auto detects the format from the chat template",
            "NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Flag(
            "reasoning parser (docs/tools.md); none disables parsing; auto detects the format from the chat template",
            "NAME",
        ),
    ] = "auto"
    reasoning_config: Annotated[dict[str, Any], json_flag("reasoning_end_str ends long reasoning")] = {}
    enable_auto_tool_choice: Annotated[
        bool,
        Flag(
            "accepted for compatibility with vLLM; tool calls are parsed whenever a tool call parser is set"
        ),
    ] = False
    generation_config: Annotated[
        str,
        Flag(
            "source of default sampling parameters: auto (the model's generation_config.json), none, or a folder",
            "WHERE",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        json_flag(
            'JSON object of default sampling parameters that overrides --generation-config, e.g. {"temperature": 0.5}'
        ),
    ] = {}
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        json_flag(
            'JSON object of default chat template arguments; a request can override them, e.g. {"enable_thinking": '
            "false}"
        ),
    ] = {}
    seed: Annotated[int, Flag("random seed of weights with --load-format dummy")] = 0

    # --- network ---
    host: Annotated[
        str, Flag("address to listen on; 0.0.0.0 accepts connections from the network: also set --api-key")
    ] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on; 0 selects a free port and prints it")] = 8000
    api_key: Annotated[
        list[str],
        Flag(
            "API keys that clients must present; accepts several values, and may be repeated",
            "KEY",
            "no authentication",
            takes_several=True,
        ),
    ] = []
    admin_key: Annotated[
        str,
        Flag(
            "key for the administrative /kv endpoints; client API keys do not grant access",
            "KEY",
            "only `quintet admin` on this machine has access",
        ),
    ] = ""
    uds: Annotated[
        str, Flag("Unix domain socket to listen on instead of --host and --port", "PATH", "none")
    ] = ""
    ssl_keyfile: Annotated[
        str, Flag("PEM file with the private key of the TLS certificate", "FILE", "none")
    ] = ""
    ssl_certfile: Annotated[
        str, Flag("PEM file with the TLS certificate chain; enables HTTPS", "FILE", "HTTP")
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        Flag(
            "PEM file with the CA certificates that verify client certificates (mutual TLS)",
            "FILE",
            "no client certificate required",
        ),
    ] = ""
    allowed_origins: Annotated[
        list[str],
        Flag(
            "CORS: allowed origin, * for all; repeat for more, or give a JSON list; [] disables CORS",
            "ORIGIN",
            "*",
        ),
    ] = msgspec.field(default_factory=lambda: ["*"])
    allowed_methods: Annotated[
        list[str], Flag("CORS: allowed method; repeat for more, or give a JSON list", "METHOD", "all")
    ] = []
    allowed_headers: Annotated[
        list[str], Flag("CORS: allowed request header; repeat for more, or give a JSON list", "HEADER", "all")
    ] = []
    allow_credentials: Annotated[
        bool, Flag("CORS: allow credentials such as cookies, for example for an authenticating proxy")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Flag("send token usage at the end of every stream, regardless of stream_options")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Flag("return log-probability tokens as token_id:7 by default; a request can override it")
    ] = False
    middleware: Annotated[
        list[str],
        Flag(
            "import path of ASGI middleware: a class, or a coroutine function of request and call_next; repeat for "
            "more; the last one is outermost",
            "NAME",
            "none",
        ),
    ] = []
    root_path: Annotated[
        str, Flag("path prefix added by a reverse proxy, whether or not the proxy strips it", "PATH", "none")
    ] = ""
    enable_tokenizer_info_endpoint: Annotated[
        bool, Flag("enable GET /tokenizer_info: tokenizer configuration and chat template")
    ] = False
    disable_fastapi_docs: Annotated[bool, Flag("do not serve /docs and /openapi.json")] = False
    max_logprobs: Annotated[
        int, Flag("maximum number of log-probabilities per token in a request; -1 for the vocabulary size")
    ] = 20
    max_body_bytes: Annotated[int | str, Flag("maximum request body size, e.g. 32MiB", "SIZE", "32MiB")] = (
        "32MiB"
    )
    max_queued_requests: Annotated[
        int, Flag("maximum number of requests in one frontend; further requests get 429 with Retry-After")
    ] = 4096
    max_queued_tokens: Annotated[
        int,
        Flag(
            "maximum queued prompt plus pending output tokens in one frontend; further requests get 429 with "
            "Retry-After",
            "TOKENS",
        ),
    ] = 1 << 23
    stream_grace: Annotated[
        float,
        Flag(
            "time that a streamed request stays paused after its client disconnects, so that the client can resume "
            "it; 0 also disables event ids",
            "SECONDS",
        ),
    ] = 30.0
    response_store: Annotated[
        str | None,
        Flag(
            "SQLite file for stored /v1/responses, which persist across restarts; must not be shared between servers",
            "PATH",
            "a file in the run folder, deleted at exit",
        ),
    ] = None
    response_store_entries: Annotated[
        int, Flag("maximum number of stored responses; 0 disables the store")
    ] = 10_000
    response_store_size: Annotated[
        int | str, Flag("maximum total size of stored responses, e.g. 1GiB", "SIZE", "256MiB")
    ] = "256MiB"
    response_store_hours: Annotated[float, Flag("response TTL after last use", "HOURS")] = 24.0
    keep_alive_interval: Annotated[
        float, Flag("interval of SSE keep-alive comments in an idle stream; 0 disables them", "SECONDS")
    ] = 15.0
    write_timeout: Annotated[
        float,
        Flag(
            "time a client may take to read pending response bytes before its connection is closed", "SECONDS"
        ),
    ] = 60.0
    header_timeout: Annotated[
        float, Flag("time a client may take to send the request headers", "SECONDS")
    ] = 20.0
    log_requests: Annotated[bool, Flag("log one line per request")] = False
    enable_prompt_embeds: Annotated[
        bool, Flag("accept prompt embeddings in completions: safetensors, base64-encoded")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag("accept chat templates in requests; only for trusted clients, because a template is a program"),
    ] = False

    # --- scheduling ---
    max_num_seqs: Annotated[int, Flag("maximum number of running requests")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Flag(
            "maximum number of tokens per step",
            "TOKENS",
            "2048, on a GPU 8192, or the minimum that other flags require",
            read=count,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Flag("split prefill of long prompts into chunks, batched with decode steps of other requests")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Flag("maximum tokens of one prompt per step while other requests wait; 0 for no limit", "TOKENS")
    ] = 0
    step_target_ms: Annotated[
        int | None,
        Flag(
            "approximate latency target of a step that mixes prefill and decode, with many running requests; two "
            "thirds of it with few; 0 for no target",
            "MS",
            "300 on a CPU, 0 elsewhere and for LLM(...)",
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "longest", "latest"],
        Flag(
            "order of waiting requests: fcfs (arrival), priority (lowest `priority` value first), longest (largest "
            "`max_tokens` first, which ends a batch soonest), latest (newest first among each 32 arrivals)",
            default_text="fcfs; longest for LLM(...)",
        ),
    ] = "fcfs"
    max_steps_in_flight: Annotated[
        int,
        Flag(
            "maximum number of steps in flight: 1 schedules synchronously, 2 schedules a step while the previous one "
            "executes"
        ),
    ] = 2
    speculative_config: Annotated[
        str | None,
        Flag(
            'speculative decoding, which changes no output (docs/speculative-decoding.md): {"method": "suffix"}, '
            '{"method": "ngram", "num_speculative_tokens": 4}, or on the CPU a draft model or head, {"method": "eagle3", '
            '"model": MODEL, "num_speculative_tokens": 4}; on a GPU, see --batch-invariant',
            "JSON",
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary"],
        Flag("summary: responses report the draft tokens of their request in metrics.speculative_decoding"),
    ] = "none"
    deadline_admission: Annotated[
        bool, Flag("reject a request at admission if it cannot meet its deadline at the measured throughput")
    ] = True
    audit: Annotated[bool, Flag("check all scheduler invariants after every step; slow, for debugging")] = (
        False
    )

    # --- memory ---
    kv_cache_memory: Annotated[
        int | str | None, Flag("KV cache memory, e.g. 2GiB", "SIZE", "a share of free memory")
    ] = None
    kv_cache_memory_share: Annotated[
        float | None,
        Flag(
            "share of the memory left after loading weights that the KV cache uses",
            "SHARE",
            "enough for four sequences of --max-model-len, or 0.125 if that is more; at most 0.4",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Flag("GPU only: share of device memory for weights, activations and KV cache together", "SHARE"),
    ] = 0.92
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Flag(
            "data type of the KV cache: model (the model's), int8 (CPU) and fp8 (about twice the tokens, slightly "
            "less exact), int4 (CPU; three times the tokens, measurable loss), auto (fp8 or int8 if the checkpoint "
            "says so, else model)",
            aliases={
                **dict.fromkeys(("fp8_e4m3", "fp8_inc"), "fp8"),
                **{f"{name}_per_token_head": name for name in ("int8", "int4")},
            },
        ),
    ] = "auto"
    swap_space: Annotated[
        float | None,
        Flag(
            "host memory for swapped-out KV blocks of preempted requests; they are swapped in where that is faster "
            "than recomputation",
            "GIB",
            "4 on a GPU, at most a quarter of free memory; 0 on a CPU",
        ),
    ] = None
    kv_transfer_config: Annotated[
        dict[str, Any],
        json_flag(
            "KV back ends host, disk, peers and store, with the settings of the following flags (docs/kv.md), e.g. "
            '{"disk": {"folder": "/var/cache/quintet", "size": "20GiB"}}'
        ),
    ] = {}
    kv_disk: Annotated[
        str | None,
        Flag(
            "CPU only: folder of the disk KV cache, which persists across restarts (docs/kv.md); protect it like the "
            "prompts",
            "FOLDER",
            "nowhere",
        ),
    ] = None
    kv_disk_size: Annotated[
        int | str | None,
        Flag(
            "maximum size of the disk KV cache per engine, e.g. 20GiB; evicts least recently used blocks",
            "SIZE",
            "8GiB",
        ),
    ] = None
    kv_store: Annotated[
        str | None,
        Flag(
            "CPU only: KV store shared between servers (docs/shared.md): file:///dev/shm/NAME for servers of one "
            "machine, s3://BUCKET/PREFIX and other fsspec URLs (quintet[store]), or an installed connector; protect "
            "it like the prompts",
            "URL",
            "none",
        ),
    ] = None
    kv_store_size: Annotated[
        int | str | None,
        Flag(
            "maximum total size of a file: KV store, e.g. 20GiB; evicts least recently used blocks",
            "SIZE",
            "8GiB",
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        Flag(
            'publish KV cache events over ZeroMQ in vLLM\'s format (docs/kv.md), e.g. {"enable_kv_cache_events": true,'
            ' "endpoint": "tcp://127.0.0.1:5557"}',
            "JSON",
            "no events",
        ),
    ] = None
    role: Annotated[
        Literal["none", "prefill", "decode", "both"],
        Flag(
            "CPU only: role in disaggregated prefill (docs/disaggregation.md): prefill computes prompts and offers their KV, "
            "decode fetches KV, both does both"
        ),
    ] = "none"
    kv_peer_listen: Annotated[
        str | None,
        Flag(
            "address that offers KV to other servers and that they can reach; engine i uses port + i; a non-loopback "
            "address requires --kv-peer-key",
            "HOST:PORT",
            "127.0.0.1:5600",
        ),
    ] = None
    kv_peers: Annotated[
        list[str],
        Flag(
            "host or network, e.g. 10.0.0.0/24, that KV may be fetched from; repeat for more",
            "HOST",
            "this machine",
        ),
    ] = []
    kv_peer_key: Annotated[
        str | None,
        Flag(
            "file with a shared secret of at least 32 bytes, the same on all servers; encrypts and authenticates KV "
            "transfer",
            "FILE",
            "a key of this user",
        ),
    ] = None
    kv_peer_memory: Annotated[
        int | str | None,
        Flag("maximum memory for offered KV per engine; evicts least recently used blocks", "SIZE", "1GiB"),
    ] = None
    block_size: Annotated[
        int | None, Flag("tokens per KV block", default_text="16, or more for models with recurrent state")
    ] = None
    enable_prefix_caching: Annotated[bool, Flag("reuse KV blocks of requests with the same prefix")] = True

    # --- device ---
    executor: Annotated[
        Literal["auto", "torch", "mock"],
        Flag(
            "torch, or mock, which returns deterministic tokens without weights, to measure the other processes; auto"
            " is torch"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag("device that runs the model; auto selects a GPU if present")
    ] = "auto"
    threads: Annotated[
        int,
        Flag(
            "compute threads per rank; 0 uses every usable core, except one in eight on machines with 8 or more"
        ),
    ] = 0
    pin_threads: Annotated[bool, Flag("pin each compute thread to one core; for dedicated machines")] = False
    batch_invariant: Annotated[
        bool,
        Flag(
            "GPU only: batch-invariant kernels, bit-identical results regardless of batch composition, at some cost "
            "in speed; a CPU is always batch-invariant"
        ),
    ] = False
    enforce_eager: Annotated[bool, Flag("GPU only: disable CUDA graphs")] = False
    allow_torch_kernels: Annotated[
        bool,
        Flag(
            "GPU only: fall back to slow torch operators if the CUDA kernels cannot be loaded; otherwise the server "
            "does not start"
        ),
    ] = False
    attention_backend: Annotated[
        str,
        Flag(
            "GPU only: attention backend of prefill: auto, quintet, torch, flashinfer, or a registered name",
            "NAME",
        ),
    ] = "auto"
    step_ms: Annotated[float, Flag("mock executor only: duration of a step", "MS")] = 0.0
    mock_script: Annotated[
        str | None,
        Flag(
            "mock executor only: JSON file of scripted responses for client tests, a list of objects with after and "
            "say",
            "FILE",
        ),
    ] = None

    # --- processes ---
    frontends: Annotated[int, Flag("number of HTTP frontend processes, which share the port")] = 1
    tokenizers: Annotated[int, Flag("number of tokenizer processes")] = 1
    detokenizers: Annotated[int, Flag("number of detokenizer processes")] = 1
    data_parallel_size: Annotated[
        int,
        Flag(
            "number of data-parallel engines, each a core and an executor with the whole model; memory and CPU cores "
            "are divided among them, and each has its own GPUs",
            "ENGINES",
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Flag(
            "number of tensor-parallel ranks; each is a process with a shard of every layer and of the KV cache, on "
            "its own CPU cores or GPU",
            "RANKS",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Flag(
            "number of pipeline stages; each is a group of --tensor-parallel-size ranks with a share of the layers",
            "STAGES",
        ),
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        Flag(
            "CPU only: number of ranks that share one KV cache instead of duplicating it, for models with fewer KV "
            "heads than ranks or with latent attention",
            "RANKS",
        ),
    ] = 1
    nnodes: Annotated[
        int,
        Flag(
            "number of hosts of a multi-host model; stages, or the ranks of a single stage, are divided evenly; "
            "--node-rank 0 serves HTTP, the other hosts run --headless",
            "HOSTS",
        ),
    ] = 1
    node_rank: Annotated[int, Flag("rank of this host, from 0", "HOST")] = 0
    headless: Annotated[
        bool,
        Flag(
            "worker host of a multi-host model: connects to --master-addr for its configuration; only MODEL, "
            "--group-key, --threads, --packed-cache and --log-level apply"
        ),
    ] = False
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Flag(
            "launcher of the other hosts: mp (start them manually) or ray (this host starts them in its Ray cluster, "
            "with a generated group key)",
            aliases={"uni": "mp"},
        ),
    ] = "mp"
    master_addr: Annotated[
        str | None,
        Flag(
            "address or name on which host 0 listens for the other hosts",
            "ADDRESS",
            "127.0.0.1; with ray, this node's Ray address",
        ),
    ] = None
    master_port: Annotated[int, Flag("port on which host 0 listens for the other hosts", "PORT")] = 29501
    group_key: Annotated[
        str | None,
        Flag(
            "file with a shared secret of at least 32 bytes, the same on all hosts; encrypts and authenticates the "
            "links between hosts",
            "FILE",
            "none",
        ),
    ] = None
    layout_invariant: Annotated[
        bool,
        Flag(
            "CPU only: bit-identical results with 1, 2, 4 or 8 ranks and any number of stages, as far as the model "
            "can be divided; requests can then resume on another layout"
        ),
    ] = False
    enable_expert_parallel: Annotated[
        bool, Flag("expert parallelism: each rank holds whole experts instead of a slice of every expert")
    ] = False
    enable_eplb: Annotated[
        bool, Flag("expert-parallel load balancing: replicate the most used experts on less loaded ranks")
    ] = False
    eplb_config: Annotated[
        str | None,
        Flag(
            'EPLB settings: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8}', "JSON"
        ),
    ] = None
    routing: Annotated[
        Routing,
        Flag(
            "load balancing policy across engines: prefix (prefix affinity and load), load (least load), session "
            "(X-Session-Id header, session_id or user), round-robin"
        ),
    ] = "prefix"
    standby: Annotated[
        bool, Flag("keep a standby tokenizer and detokenizer process, which take over at once when one fails")
    ] = True
    boot_timeout: Annotated[float, Flag("maximum time until all processes are ready", "SECONDS")] = 600.0
    max_restarts: Annotated[
        int | None,
        Flag(
            "restarts of one process within a minute; one more failure stops the server",
            "COUNT",
            "5; 12 for the executor",
        ),
    ] = None
    drain_timeout: Annotated[
        float, Flag("time that requests in flight may take to finish after SIGTERM", "SECONDS")
    ] = 30.0
    stall_timeout: Annotated[
        float, Flag("time without a heartbeat or progress before a process is restarted", "SECONDS")
    ] = 10.0
    trace: Annotated[
        str | None,
        Flag(
            "folder where each process writes its trace at exit; `quintet trace FOLDER` reads it",
            "FOLDER",
            "none",
        ),
    ] = None
    record: Annotated[
        str | None,
        Flag(
            "folder where each process records its messages, including prompts and outputs, for `quintet replay`",
            "FOLDER",
            "none",
        ),
    ] = None
    record_mb: Annotated[
        int, Flag("maximum size of one process's recording; the oldest part is overwritten", "MB")
    ] = 512
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Flag("minimum level of log lines")] = (
        "INFO"
    )
