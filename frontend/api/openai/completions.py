"""POST /v1/completions, and POST /invocations: SageMaker's single path for completions and chat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quintet.frontend.api.answer import Submissions, session_of
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    AnswerOptions,
    ChunkAnswer,
    ChunkFormat,
    ChunkWriter,
    encode_json,
    finish_name,
    metrics_of,
    options_of,
    token_ids_json,
    usage_of,
)
from quintet.frontend.api.openai.beams import answer_beams
from quintet.frontend.api.openai.chat import chat_completions
from quintet.frontend.api.openai.embeds import embeds_prompts
from quintet.frontend.api.openai.generation import GenerationRequest, answer_generation
from quintet.frontend.api.openai.kv_transfer_params import take_kv_transfer
from quintet.frontend.api.openai.logprobs import (
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from quintet.frontend.api.openai.prompts import parse_prompts
from quintet.frontend.api.openai.types import CompletionBody
from quintet.frontend.api.outputs import Output
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import Prompt, Started, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams

DEFAULT_MAX_TOKENS = 16
_decoder = msgspec.json.Decoder(CompletionBody)


class _Kind(msgspec.Struct):
    """Fields that determine the request type."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_kind_decoder = msgspec.json.Decoder(_Kind)


class CompletionAnswer(ChunkAnswer, tag="completion"):
    """Format of a completion."""

    def shape(self) -> ChunkFormat:
        return SHAPE

    def whole(self, outputs: Sequence[Output], submissions: Submissions) -> dict[str, object]:
        options = self.options
        if options.echo_only:
            for output in outputs:
                output.text, output.token_ids, output.logprobs = "", (), []
        answer: dict[str, object] = {
            **options.head("text_completion"),
            "choices": [_choice(output, options) for output in outputs],
            "usage": usage_of(submissions.streams, options.echo_only, submissions.streams_per_prompt),
        }
        if options.num_spec_tokens is not None:
            answer["metrics"] = metrics_of(submissions.streams, options.num_spec_tokens)
        return answer


async def completions(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    parse.check_combinations(body, config)
    parse.check_logprob_token_ids(body, has_logprobs=body.logprobs is not None)
    prompts = await _prompts(service, body)
    params = completion_params(body, config)
    options = options_of("cmpl", body, params, http_request, config)
    answer = CompletionAnswer(len(prompts), params.n, body.stream_interval or 1, options)
    deadline_ns = parse.deadline_ns(body, http_request)
    kv_transfer = take_kv_transfer(body, len(prompts), config) if body.kv_transfer_params else None
    parse.reject_unsupported(body)
    request = GenerationRequest(
        body,
        prompts,
        "prompt",
        params,
        answer,
        body.max_tokens is None,
        deadline_ns,
        session_of(http_request, body.session_id, body.user),
        kv_transfer=kv_transfer,
    )
    await (answer_beams if body.use_beam_search else answer_generation)(service, http_request, request)


async def invocations(service: Service, http_request: HttpRequest) -> None:
    """Forward to chat completions (``messages``) or completions (``prompt``)."""
    kind = parse.decode(await http_request.read_json_body(service.bodies), _kind_decoder)
    if kind.messages is not msgspec.UNSET:
        await chat_completions(service, http_request)
    elif kind.prompt is not msgspec.UNSET:
        await completions(service, http_request)
    else:
        raise invalid(
            "messages and prompt are both missing; send one of them.",
            "messages",
        )


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Return the prompts: embeddings first. With embeddings, ``prompt`` may be empty."""
    config = service.config
    if isinstance(body.prompt, list) and not isinstance(body.prompt[0] if body.prompt else 0, int):
        num_choices = 1 if body.use_beam_search else body.n or 1
        service.admission.check_number(len(body.prompt) * num_choices)
    prompts: list[Prompt] = [*await embeds_prompts(body, config)]
    if not prompts or body.prompt:
        others = parse_prompts(body.prompt, "prompt", body, config.model, body.suffix or "")
        _check_suffix(body, others)
        prompts += others
    return prompts


def _check_suffix(body: CompletionBody, prompts: Sequence[TextPrompt | TokenPrompt]) -> None:
    if not body.suffix:
        return
    if not all(isinstance(prompt, TextPrompt) for prompt in prompts):
        raise invalid(
            "suffix was sent with a prompt of token ids; send the prompt as text, or put the model's infill tokens between "
            "the ids yourself and leave suffix out.",
            "suffix",
        )
    for name in ("echo", "truncate_prompt_tokens", "use_beam_search"):
        if getattr(body, name) not in (None, False):
            raise invalid(f"suffix cannot be combined with {name}; leave one of them out.", name)


def completion_params(body: CompletionBody, config: EngineConfig) -> SamplingParams:
    """Return the checked sampling parameters of a request."""
    model = config.model
    default = int(model.generation_defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    max_tokens = default if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1
    params = parse.sampling_params(body, model, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return parse.checked(params, config.frontend.max_logprobs, model, parse.names_of(body))


def _on_start(writer: ChunkWriter, index: int, started: Started) -> list[bytes]:
    """Return the event of an echoed prompt."""
    options = writer.options
    if not options.echo:
        return []
    logprobs = echoed_logprobs(started, options) if options.logprobs is not None else None
    return [
        writer.chunk(
            index,
            started.prompt_text or "",
            logprobs,
            token_ids=() if options.return_token_ids else None,
            prompt_ids=started.prompt_ids,
            usage=writer.usage_at_start(started),
        )
    ]


def _ids(token_ids: Sequence[int] | None, prompt_ids: bytes) -> bytes:
    prompt = encode_json(list(unpack_i32(prompt_ids)) if prompt_ids else None)
    return token_ids_json(token_ids) + b',"prompt_token_ids":' + prompt


SHAPE = ChunkFormat(
    head=lambda options: options.head("text_completion"),
    open=b'"text":',
    close=b"",
    plain_end=b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null,"prompt_token_ids":null',
    logprobs=completion_logprobs,
    ids=_ids,
    on_start=_on_start,
)


def _choice(output: Output, options: AnswerOptions) -> dict[str, object]:
    started = output.stream.started
    text = output.text
    logprobs = completion_logprobs(output.logprobs, options) if options.logprobs is not None else None
    if options.echo and started is not None:
        text = (started.prompt_text or "") + text
        if logprobs is not None:
            logprobs = joined(echoed_logprobs(started, options), logprobs)
    choice: dict[str, object] = {
        "index": output.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_name(output.finish),
        "stop_reason": output.finish.stop_reason,
        "prompt_logprobs": prompt_logprobs(started, options) if started is not None else None,
    }
    with_ids = options.return_token_ids
    choice["token_ids"] = list(output.token_ids) if with_ids else None
    choice["prompt_token_ids"] = (
        list(unpack_i32(started.prompt_ids))
        if started is not None and started.prompt_ids and with_ids
        else None
    )
    return choice
