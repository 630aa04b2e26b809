"""The one table of flags: what a user may set, in which words, with which default.

The command line, the YAML file and ``LLM(**kwargs)`` are three spellings of `Options`
(`quintet.deploy.config.flag_table`); nothing else declares a flag. What the values mean together is decided in
`quintet.deploy.config.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from quintet.deploy.config.flag_values import count, json_object
from quintet.wire.config import (
    ActivationDtype,
    ChatContentFormat,
    KvCacheDtype,
    LogitsDtype,
    Quantization,
    Routing,
)

MODEL, NETWORK, SCHEDULING, MEMORY, PROCESSES, DEVICE = (
    "model", "network", "scheduling", "memory", "processes", "device",
)  # fmt: skip

GROUP_TITLES: dict[str, str] = {
    MODEL: "model and tokenizer",
    NETWORK: "network and API",
    SCHEDULING: "scheduling",
    MEMORY: "KV memory",
    DEVICE: "device",
    PROCESSES: "processes",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """How one field of `Options` is shown to the user."""

    group: str
    help: str
    metavar: str | None = None
    default_text: str | None = None
    """What the default is in words, when the field's own default (None) says nothing."""
    read: Callable[[object, str], object] | None = None
    """From what was given, and the flag's name, to a value of the field."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of choices."""
    takes_several: bool = False
    """Of a list: whether several words may follow the flag once."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asked for, before the model card and the machine have been looked at."""

    # --- model ---
    model: Annotated[
        str | None,
        Flag(
            MODEL, "local folder, .gguf file or hub name", "MODEL", "the small model that ships with Quintet"
        ),
    ] = None
    tokenizer: Annotated[
        str | None, Flag(MODEL, "folder or hub name of the tokenizer", "PATH", "the model's own")
    ] = None
    served_model_name: Annotated[
        list[str],
        Flag(
            MODEL,
            "names clients ask for, behind MODEL; the first is echoed",
            "NAME",
            "MODEL as given",
            takes_several=True,
        ),
    ] = []
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Flag(
            MODEL,
            "number format of weights and KV; auto keeps the checkpoint's",
            aliases={"half": "float16", "float": "float32"},
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag(
            MODEL,
            "longest prompt plus output, in tokens: 8192, 8K, or auto",
            "TOKENS",
            "the model's own, or less if memory is short",
            read=count,
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Flag(
            MODEL,
            "dummy fills the weights with seeded random numbers instead of reading them",
            aliases=dict.fromkeys(
                ("safetensors", "hf", "pt", "gguf", "npcache", "mistral", "fastsafetensors", "bitsandbytes"),
                "auto",
            ),
        ),
    ] = "auto"
    revision: Annotated[
        str | None,
        Flag(MODEL, "branch, tag or commit of a model of the hub", "NAME", "main"),
    ] = None
    tokenizer_revision: Annotated[str | None, Flag(MODEL, "the same, of --tokenizer", "NAME", "main")] = None
    hf_overrides: Annotated[
        dict[str, Any],
        Flag(
            MODEL,
            "JSON object whose values go before those of config.json, also within objects",
            "JSON",
            "none",
            read=json_object,
        ),
    ] = {}
    model_impl: Annotated[
        Literal["auto", "quintet", "transformers"],
        Flag(
            MODEL,
            "whose layers compute: quintet's own, or those of transformers over Quintet's KV memory, slower; auto takes "
            "transformers for models that Quintet has no layers for",
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        Flag(
            MODEL,
            "with transformers' layers: execute Python files that the model's folder brings, with all rights of the server",
        ),
    ] = False
    quantization: Annotated[
        Quantization,
        Flag(
            MODEL,
            "what linear layers become when they are loaded: int8 or int4 weights, or w8a8, which computes in 8 bit too; a "
            "checkpoint that is quantized says itself how, and the name of its format is all that may be given",
        ),
    ] = "none"
    activation_dtype: Annotated[
        ActivationDtype,
        Flag(
            MODEL,
            "CPU: what inputs of layers become where weights are integers; auto is 16 bits, or as the checkpoint says; int8 is 8 "
            "bits, as llama.cpp has it: faster at prompts, and less exact (docs/quantization.md)",
        ),
    ] = "auto"
    logits_dtype: Annotated[
        LogitsDtype,
        Flag(
            MODEL,
            "number format of logits: float32 keeps the output layer's sums as they are; model rounds them to the model's "
            "format, as transformers does",
        ),
    ] = "float32"
    packed_cache: Annotated[
        str | None,
        Flag(
            MODEL,
            "folder where packed weights are kept, so that the next start maps them instead of packing again",
            "FOLDER",
            "none",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Flag(
            MODEL,
            "Jinja file, or the template itself; replaces all of the model's",
            "PATH",
            "the model's own",
        ),
    ] = None
    chat_template_content_format: Annotated[
        ChatContentFormat,
        Flag(
            MODEL,
            "form of a message's content in the chat template: string, openai (a list of parts), or auto, what the template "
            "iterates (docs/chat-templates.md)",
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str,
        Flag(
            MODEL,
            "how calls of tools are read from answers: a name of docs/tools.md, none, or auto, what the chat template writes",
            "NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Flag(
            MODEL,
            "how reasoning is told from answers: a name of docs/tools.md, none, or auto, what the chat template writes",
            "NAME",
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, Flag(MODEL, "taken for other servers' sake: calls are read wherever there is a parser")
    ] = False
    generation_config: Annotated[
        str,
        Flag(
            MODEL,
            "where sampling defaults come from: auto (the model's generation_config.json), none, or a folder",
            "WHERE",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        Flag(
            MODEL,
            'JSON object of sampling defaults that go before these, e.g. {"temperature": 0.5}',
            "JSON",
            "none",
            read=json_object,
        ),
    ] = {}
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Flag(
            MODEL,
            'JSON object of arguments of the chat template that a request does not give, e.g. {"enable_thinking": false}',
            "JSON",
            "none",
            read=json_object,
        ),
    ] = {}
    seed: Annotated[int, Flag(MODEL, "seed of the random weights of --load-format dummy")] = 0

    # --- network ---
    host: Annotated[
        str,
        Flag(NETWORK, "address to listen on; 0.0.0.0 opens the server to the network: set --api-key then"),
    ] = "127.0.0.1"
    port: Annotated[int, Flag(NETWORK, "port to listen on; 0 picks a free one and prints it")] = 8000
    api_key: Annotated[
        list[str],
        Flag(
            NETWORK,
            "keys that clients may present; several, or repeat",
            "KEY",
            "none: open to localhost",
            takes_several=True,
        ),
    ] = []
    admin_key: Annotated[
        str,
        Flag(
            NETWORK,
            "key that operators must present for /kv, beside `quintet admin` on this machine; no client's key opens it",
            "KEY",
            "none: only `quintet admin`",
        ),
    ] = ""
    uds: Annotated[
        str, Flag(NETWORK, "Unix socket to listen on instead of host and port", "PATH", "none")
    ] = ""
    ssl_keyfile: Annotated[
        str, Flag(NETWORK, "PEM file of the certificate's private key", "FILE", "none")
    ] = ""
    ssl_certfile: Annotated[
        str, Flag(NETWORK, "PEM file of the server's certificate chain: serve https", "FILE", "none: http")
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        Flag(
            NETWORK,
            "PEM file of the authorities of which clients must present a certificate",
            "FILE",
            "none: clients need none",
        ),
    ] = ""
    allowed_origins: Annotated[
        list[str],
        Flag(
            NETWORK,
            "web origin allowed to call from a browser, * for all; repeat for more, or give a JSON list, [] for none",
            "ORIGIN",
            "*: keys decide who is served",
        ),
    ] = msgspec.field(default_factory=lambda: ["*"])
    allowed_methods: Annotated[
        list[str],
        Flag(NETWORK, "method that such origins may use; given as origins are", "METHOD", "all there are"),
    ] = []
    allowed_headers: Annotated[
        list[str], Flag(NETWORK, "header that such origins may send; given as origins are", "HEADER", "all")
    ] = []
    allow_credentials: Annotated[
        bool, Flag(NETWORK, "let such origins send cookies and the like: a proxy in front may ask for them")
    ] = False
    enable_force_include_usage: Annotated[
        bool, Flag(NETWORK, "end every stream with its usage, whether stream_options asks for it or not")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Flag(NETWORK, "spell tokens of log-probabilities as token_id:7 unless a request says otherwise"),
    ] = False
    middleware: Annotated[
        list[str],
        Flag(
            NETWORK,
            "dotted name of ASGI middleware: a class, or a coroutine function of request and call_next; repeat for more, the last"
            " is the outermost",
            "NAME",
            "none",
        ),
    ] = []
    root_path: Annotated[
        str, Flag(NETWORK, "path prefix of a proxy in front, whether it takes it off or not", "PATH", "none")
    ] = ""
    enable_tokenizer_info_endpoint: Annotated[
        bool, Flag(NETWORK, "tell the tokenizer's configuration and chat template at GET /tokenizer_info")
    ] = False
    max_logprobs: Annotated[
        int,
        Flag(
            NETWORK,
            "most log-probabilities a request may ask for per token; -1 for as many as there are tokens",
        ),
    ] = 20
    max_body_bytes: Annotated[
        int | str, Flag(NETWORK, "largest request body, e.g. 32MiB", "SIZE", "32MiB")
    ] = "32MiB"
    max_queued_requests: Annotated[
        int, Flag(NETWORK, "requests one frontend holds at most; one more is answered 429 with Retry-After")
    ] = 4096
    max_queued_tokens: Annotated[
        int, Flag(NETWORK, "tokens these may owe, prompts and outputs; beyond it, 429 as well", "TOKENS")
    ] = 1 << 23
    stream_grace: Annotated[
        float,
        Flag(
            NETWORK,
            "how long a streamed request waits, paused, for a client that was cut off; 0 switches event ids off too",
            "SECONDS",
        ),
    ] = 30.0
    response_store: Annotated[
        str | None,
        Flag(
            NETWORK,
            "file that keeps /v1/responses beyond the end of the server; of one server alone",
            "PATH",
            "one in the run folder",
        ),
    ] = None
    response_store_entries: Annotated[int, Flag(NETWORK, "responses kept at most; 0 keeps none")] = 10_000
    response_store_size: Annotated[
        int | str, Flag(NETWORK, "what they may hold together, e.g. 1GiB", "SIZE", "256MiB")
    ] = "256MiB"
    response_store_hours: Annotated[
        float, Flag(NETWORK, "how long a response is kept after it was last gone on with", "HOURS")
    ] = 24.0
    keep_alive_interval: Annotated[
        float,
        Flag(NETWORK, "seconds of silence after which a stream gets an SSE comment; 0 for never", "SECONDS"),
    ] = 15.0
    write_timeout: Annotated[
        float, Flag(NETWORK, "seconds a client may leave an answer unread; then it is cut off", "SECONDS")
    ] = 60.0
    header_timeout: Annotated[
        float, Flag(NETWORK, "seconds a client may take to send a request's headers", "SECONDS")
    ] = 20.0
    log_requests: Annotated[bool, Flag(NETWORK, "log one line per request")] = False
    enable_prompt_embeds: Annotated[
        bool, Flag(NETWORK, "let completions bring prompts as embeddings: safetensors, in base64")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag(
            NETWORK,
            "let requests bring chat templates of their own; only for clients you trust: a template is a program",
        ),
    ] = False

    # --- scheduling ---
    max_num_seqs: Annotated[int, Flag(SCHEDULING, "requests computed together at most")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Flag(
            SCHEDULING,
            "tokens computed in one step at most",
            "TOKENS",
            "2048, on a GPU 8192, or what the other flags need",
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Flag(SCHEDULING, "compute long prompts in chunks beside the decoding of others")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Flag(SCHEDULING, "most tokens of one prompt per step while others wait; 0 for no limit", "TOKENS"),
    ] = 0
    step_target_ms: Annotated[
        int | None,
        Flag(
            SCHEDULING,
            "how long a step with prompts in it may hold up those who decode, about, where requests are many, two thirds of it "
            "where they are few; 0 for as long as it takes",
            "MS",
            "300 on a CPU, 0 elsewhere and for LLM(...)",
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "longest", "latest"],
        Flag(
            SCHEDULING,
            "who goes first: first come first served, the lowest `priority` of the request, to end a batch soonest the "
            "largest `max_tokens`, or of each 32 that came who came last",
            default_text="fcfs; longest for LLM(...)",
        ),
    ] = "fcfs"
    depth: Annotated[
        int, Flag(SCHEDULING, "steps in flight: 1 is synchronous, 2 plans a step while the last one computes")
    ] = 2
    refuse_hopeless: Annotated[
        bool,
        Flag(SCHEDULING, "refuse at once a request that will not meet its deadline, at the pace measured"),
    ] = True
    audit: Annotated[
        bool, Flag(SCHEDULING, "check every invariant after every step (slow; for debugging)")
    ] = False

    # --- memory ---
    kv_cache_memory: Annotated[
        int | str | None, Flag(MEMORY, "memory for KV, e.g. 2GiB", "SIZE", "a share of what is free")
    ] = None
    kv_cache_memory_share: Annotated[
        float | None,
        Flag(
            MEMORY,
            "share for KV of the memory left after the weights",
            "SHARE",
            "room for four sequences of --max-model-len, or 0.125 if that is more; at most 0.4",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Flag(MEMORY, "GPU only: share of the device's memory for weights, work and KV together", "SHARE"),
    ] = 0.92
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Flag(
            MEMORY,
            "number format of KV: int8 (on a CPU) and fp8 hold about twice the tokens of bf16, a little less exactly; int4 (on a"
            " CPU) three times as many, at a loss one can measure; model: the model's own; auto: fp8 or int8 where the"
            " checkpoint says so, else the model's own",
            aliases={"fp8_e4m3": "fp8"},
        ),
    ] = "auto"
    swap_space: Annotated[
        float | None,
        Flag(
            MEMORY,
            "host memory for KV of requests that had to make room: copied back where that is faster than computing it again",
            "GIB",
            "4 on a GPU, but at most a quarter of what is free; 0 on the CPU",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        Flag(
            MEMORY,
            "folder where KV of prompts and answers outlives the server: a prompt that was computed before is read from there"
            " (docs/kv.md). On a CPU; what it keeps is as private as the prompts",
            "FOLDER",
            "nowhere",
        ),
    ] = None
    kv_disk_size: Annotated[
        int | str | None,
        Flag(
            MEMORY, "most of it, for each engine, e.g. 20GiB; what was used longest ago goes", "SIZE", "8GiB"
        ),
    ] = None
    kv_store: Annotated[
        str | None,
        Flag(
            MEMORY,
            "store of KV that servers share (docs/shared.md): file:///dev/shm/NAME for those of one machine, s3://BUCKET/PREFIX"
            " and others by fsspec (quintet[store]), or an installed connector's. On a CPU; it is as private as the prompts",
            "URL",
            "none",
        ),
    ] = None
    kv_store_size: Annotated[
        int | str | None,
        Flag(
            MEMORY,
            "most of what is kept at a file: store by all servers together, e.g. 20GiB; what was used longest ago goes",
            "SIZE",
            "8GiB",
        ),
    ] = None
    kv_events_config: Annotated[
        str | None,
        Flag(
            MEMORY,
            "tell outside routers over ZeroMQ which blocks there are, in vLLM's format (docs/kv.md), e.g."
            ' {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}',
            "JSON",
            "nobody is told",
        ),
    ] = None
    role: Annotated[
        Literal["alone", "prefill", "decode", "both"],
        Flag(
            MEMORY,
            "of requests that two servers compute, one the prompt and one the answer (docs/apart.md): prefill computes prompts"
            " and offers their KV, decode fetches it; both do both. On a CPU",
        ),
    ] = "alone"
    kv_peer_listen: Annotated[
        str | None,
        Flag(
            MEMORY,
            "where KV is offered to other servers: the address by which they reach this one; each further engine has the next"
            " port. Beyond this machine it wants --kv-peer-key",
            "HOST:PORT",
            "127.0.0.1:5600",
        ),
    ] = None
    kv_peers: Annotated[
        list[str],
        Flag(
            MEMORY,
            "host or network, such as 10.0.0.0/24, that KV may be fetched from; repeat for more",
            "HOST",
            "this machine",
        ),
    ] = []
    kv_peer_key: Annotated[
        str | None,
        Flag(
            MEMORY,
            "file with a secret of 32 bytes or more that all servers have: they talk encrypted, and to nobody else",
            "FILE",
            "this user's own",
        ),
    ] = None
    kv_peer_memory: Annotated[
        int | str | None,
        Flag(
            MEMORY, "most of what is offered, for each engine; what was used longest ago goes", "SIZE", "1GiB"
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Flag(
            MEMORY,
            "tokens in a block of KV memory; 16, or as many as take what a state does, if nothing is said",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Flag(MEMORY, "keep the KV of shared prompt beginnings")] = True

    # --- device ---
    executor: Annotated[
        Literal["auto", "torch", "mock"],
        Flag(DEVICE, "auto is torch; mock answers deterministic tokens without weights, to measure the rest"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag(DEVICE, "where the model runs; auto takes a GPU if there is one")
    ] = "auto"
    threads: Annotated[
        int,
        Flag(
            DEVICE,
            "compute threads of the executor, of each rank; 0 takes every core it may use, on 8 or more all but one in eight",
        ),
    ] = 0
    pin_threads: Annotated[
        bool, Flag(DEVICE, "keep each compute thread on one core; for machines that serve nothing else")
    ] = False
    batch_invariant: Annotated[
        bool,
        Flag(
            DEVICE,
            "GPU only: the same bits for the same request whatever else is in the batch, at some cost in speed; a CPU always "
            "gives them",
        ),
    ] = False
    enforce_eager: Annotated[
        bool, Flag(DEVICE, "GPU only: launch every kernel by itself rather than captured graphs")
    ] = False
    allow_torch_kernels: Annotated[
        bool,
        Flag(
            DEVICE,
            "GPU only: use torch's slow operators if the CUDA kernels cannot be loaded; default: do not start",
        ),
    ] = False
    attention_backend: Annotated[
        str,
        Flag(
            DEVICE,
            "GPU only: attention of prompts: auto, quintet, torch, flashinfer, or a registered name",
            "NAME",
        ),
    ] = "auto"
    step_ms: Annotated[float, Flag(DEVICE, "mock executor only: how long a step takes", "MS")] = 0.0
    mock_script: Annotated[
        str | None,
        Flag(
            DEVICE,
            "mock executor only: answers to prompts, for tests of clients; JSON of a list of objects with after and say",
            "FILE",
        ),
    ] = None

    # --- processes ---
    frontends: Annotated[int, Flag(PROCESSES, "HTTP processes; they share the port")] = 1
    tokenizers: Annotated[int, Flag(PROCESSES, "processes that turn text into tokens")] = 1
    detokenizers: Annotated[int, Flag(PROCESSES, "processes that turn tokens into text")] = 1
    data_parallel_size: Annotated[
        int,
        Flag(
            PROCESSES,
            "engines, each a core and an executor with the whole model: memory and processors are divided among them, "
            "GPUs are one each, or one for each of their ranks",
            "ENGINES",
        ),
    ] = 1
    tensor_parallel_size: Annotated[
        int,
        Flag(
            PROCESSES,
            "ranks, processes that each compute a share of every layer, on processors or a GPU and with weights and KV of their "
            "own: all together one executor",
            "RANKS",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Flag(
            PROCESSES,
            "stages, groups of --tensor-parallel-size ranks that each have some of the layers: so many steps are computed at "
            "once, of requests that take turns",
            "STAGES",
        ),
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        Flag(
            PROCESSES,
            "CPU: ranks that keep one KV memory together where each would have a copy: of fewer KV heads than ranks, of latents",
            "RANKS",
        ),
    ] = 1
    nnodes: Annotated[
        int,
        Flag(
            PROCESSES,
            "hosts that compute the model, each as many of the stages, or of the ranks of one: --node-rank 0 answers, the others "
            "are --headless",
            "HOSTS",
        ),
    ] = 1
    node_rank: Annotated[int, Flag(PROCESSES, "which of them this one is, from 0", "HOST")] = 0
    headless: Annotated[
        bool,
        Flag(
            PROCESSES,
            "compute for the host at --master-addr, which says what; of other flags only MODEL, --group-key, --threads, "
            "--packed-cache and --log-level count here",
        ),
    ] = False
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Flag(
            PROCESSES,
            "who starts the other hosts: mp, you; ray, this one, on other nodes of the Ray cluster that it runs in, with a group "
            "key of its own",
        ),
    ] = "mp"
    master_addr: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "where the first host listens for the others: by name or address",
            "ADDRESS",
            "127.0.0.1; with ray, this node's in Ray",
        ),
    ] = None
    master_port: Annotated[int, Flag(PROCESSES, "its port for that", "PORT")] = 29501
    group_key: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "file with a secret of 32 bytes or more that all hosts have: they talk encrypted, and to nobody else",
            "FILE",
            "none",
        ),
    ] = None
    layout_invariant: Annotated[
        bool,
        Flag(
            PROCESSES,
            "CPU: the same bits with 1, 2, 4 or 8 ranks, as far as the model can be divided so, and with any stages: a request "
            "may go on where there are others",
        ),
    ] = False
    enable_expert_parallel: Annotated[
        bool, Flag(PROCESSES, "each rank keeps some experts whole, not some columns of every expert")
    ] = False
    enable_eplb: Annotated[
        bool, Flag(PROCESSES, "experts that are asked for most are copied to ranks that have less to do")
    ] = False
    eplb_config: Annotated[
        str | None,
        Flag(
            PROCESSES,
            'how many, and when: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8}',
            "JSON",
        ),
    ] = None
    routing: Annotated[
        Routing,
        Flag(
            PROCESSES,
            "by what the engine of a request is chosen, where there are several: prefix (what it has computed before, and "
            "what it has to do), load, session (X-Session-Id, or the user), round-robin",
        ),
    ] = "prefix"
    spares: Annotated[
        bool,
        Flag(
            PROCESSES,
            "keep a tokenizer and a detokenizer booted in reserve: when one dies, the next works at once",
        ),
    ] = True
    boot_timeout: Annotated[
        float, Flag(PROCESSES, "seconds the processes may take to get ready", "SECONDS")
    ] = 600.0
    max_restarts: Annotated[
        int | None,
        Flag(
            PROCESSES,
            "deaths of one process within a minute that are made good; one more ends the server",
            "COUNT",
            "5, or 12 of the executor",
        ),
    ] = None
    drain_timeout: Annotated[
        float, Flag(PROCESSES, "seconds that requests in flight get to finish after SIGTERM", "SECONDS")
    ] = 30.0
    stall_timeout: Annotated[
        float,
        Flag(PROCESSES, "seconds without a sign of life after which a process is replaced", "SECONDS"),
    ] = 10.0
    trace: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "folder where each process writes what it did when, as it ends; `quintet trace FOLDER` reads it",
            "FOLDER",
            "none",
        ),
    ] = None
    record: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "folder where each process keeps what it is sent and sends, prompts and outputs included, for `quintet replay`",
            "FOLDER",
            "none",
        ),
    ] = None
    record_mb: Annotated[
        int,
        Flag(PROCESSES, "MB that the recording of each process may take: the oldest part makes room", "MB"),
    ] = 512
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Flag(PROCESSES, "least important lines shown")
    ] = "INFO"
