"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from quintet.frontend.api.answer import Submissions, session_of, stream_answer, submit_all
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    AnswerOptions,
    ChunkFormat,
    ChunkWriter,
    encode_json,
    finish_name,
    head_of,
    metrics_of,
    options_of,
    token_ids_json,
    usage_of,
)
from quintet.frontend.api.openai.best_of import BeamRequest, beam_answer, best_choices, rankable, stream_beams
from quintet.frontend.api.openai.embeds import embeds_prompts
from quintet.frontend.api.openai.kv_transfer_params import take_kv_transfer, with_params
from quintet.frontend.api.openai.logprobs import (
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.api.openai.types import CompletionBody
from quintet.frontend.api.outputs import Output, collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.stream_state import FROM_START, Answer, StreamCursor, StreamId, resume_token_for
from quintet.frontend.resume.token_relay import enable_relay, resume_state
from quintet.frontend.service import Service
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import Prompt, Started, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams, check_token_ids
from quintet.wire.request import RequestSpec, check_length

DEFAULT_MAX_TOKENS = 16
_decoder = msgspec.json.Decoder(CompletionBody)


class CompletionAnswer(Answer, tag="completion"):
    """Event format of a completion."""

    options: AnswerOptions


async def completions(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/completions."""
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    parse.check_combinations(body, config)
    parse.check_logprob_token_ids(body, has_logprobs=body.logprobs is not None)
    prompts = await _prompts(service, body)
    params = completion_params(body, config)
    options = options_of("cmpl", body, params, http_request, config)
    answer = CompletionAnswer(len(prompts), params.n, body.stream_interval or 1, options)
    resume_token = resume_token_for(answer, config) if body.stream and http_request.reads_event_ids else None
    deadline_ns = parse.deadline_ns(body, http_request)
    session = session_of(http_request, body.session_id, body.user)
    kv_transfer = take_kv_transfer(body, len(prompts), config) if body.kv_transfer_params else None
    parse.reject_unsupported(body)
    if body.use_beam_search:
        is_clamped = body.max_tokens is None
        request = BeamRequest(prompts, body, params, "prompt", is_clamped, options, deadline_ns, session)
        if body.stream:
            await stream_beams(service, http_request, request, partial(ChunkWriter, SHAPE))
            return
        outputs, submissions = await beam_answer(service, http_request, request)
        await http_request.respond_json(_response_json(outputs, submissions, options))
        return
    prior = http_request.partial_response
    seeds, position, received = FROM_START if prior is None else resume_state(prior, params.n, len(prompts))
    submissions = submit_all(
        service,
        body,
        prompts,
        RequestSpec(
            params if body.best_of is None else rankable(params, body),
            http_request.arrival_ns,
            deadline_ns=deadline_ns,
            resume_token=resume_token,
            return_prompt_ids=options.return_token_ids,
            kv_transfer=kv_transfer,
        ),
        clamp_max_tokens=body.max_tokens is None,
        interval=answer.interval,
        echo=options.echo,
        session=session,
        received=received,
        seeds=seeds,
    )
    if http_request.partial_response is not None and options.include_usage:
        await replay_usage(service, submissions)
    if body.stream:
        chunks = writer(answer, submissions.stream_id, position)
        if http_request.wants_relay:
            enable_relay(http_request, chunks, submissions)
        await stream_answer(service, http_request, submissions, chunks)
    else:
        outputs = best_choices(await collect_outputs(http_request, submissions), body)
        if options.echo_only:
            for output in outputs:
                output.text, output.token_ids, output.logprobs = "", (), []
        whole = _response_json(outputs, submissions, options)
        await http_request.respond_json(with_params(whole, submissions.streams, config))


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Return the prompts: embeddings first. With embeddings, ``prompt`` may be empty."""
    config = service.config
    if isinstance(body.prompt, list) and not isinstance(body.prompt[0] if body.prompt else 0, int):
        num_choices = 1 if body.use_beam_search else body.n or 1
        service.admission.check_number(len(body.prompt) * num_choices)
    prompts: list[Prompt] = [*await embeds_prompts(body, config)]
    if not prompts or body.prompt:
        others = parse_prompts(body, config.model)
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


def parse_prompts(body: CompletionBody, model: ModelConfig) -> list[TextPrompt | TokenPrompt]:
    """Return the prompts of a body: one, or one per element of a list of texts or id lists."""
    given = body.prompt
    if given is None:
        raise invalid("prompt is missing; send text, token ids, or a list of either.", "prompt")
    special, suffix = body.add_special_tokens is not False, body.suffix or ""
    if isinstance(given, str):
        return [TextPrompt(given, special, suffix)]
    if not given:
        raise invalid("prompt is []; it must hold at least one token id or prompt.", "prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [token_prompt(ids, body.truncate_prompt_tokens, model)]
    if ids:
        raise invalid(
            "prompt mixes token ids with prompts; send one list of ids, a list of texts, or a list of lists of "
            "ids.",
            "prompt",
        )
    return [
        TextPrompt(item, special, suffix)
        if isinstance(item, str)
        else token_prompt(item, body.truncate_prompt_tokens, model)
        for item in given
        if not isinstance(item, int)
    ]


def token_prompt(
    ids: Sequence[int],
    truncate_prompt_tokens: int | None,
    model: ModelConfig,
    field: str = "prompt",
    max_tokens: int | None = None,
) -> TokenPrompt:
    """Return checked ids as a prompt. Raises `RequestError` for ``field``."""
    if truncate_prompt_tokens is None:
        check_length(len(ids), model.max_model_len, field, max_tokens)
    if not ids:
        raise invalid(f"{field} holds an empty list of token ids; send at least one token.", field)
    check_token_ids(ids, model.vocab_size, field)
    return TokenPrompt(pack_i32(ids))


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
    head=head_of("text_completion"),
    open=b'"text":',
    close=b"",
    plain_end=b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null,"prompt_token_ids":null',
    logprobs=completion_logprobs,
    ids=_ids,
    on_start=_on_start,
)


def writer(
    answer: CompletionAnswer, stream_id: StreamId | None, position: StreamCursor | None = None
) -> ChunkWriter:
    """Return the event writer of a completion."""
    return ChunkWriter(SHAPE, answer.options, answer.num_prompts, stream_id, position)


def _response_json(
    outputs: list[Output], submissions: Submissions, options: AnswerOptions
) -> dict[str, object]:
    answer: dict[str, object] = {
        "id": options.response_id,
        "object": "text_completion",
        "created": options.created,
        "model": options.model,
        "choices": [_choice(output, options) for output in outputs],
        "usage": usage_of(submissions.streams, options.echo_only, submissions.streams_per_prompt),
    }
    if options.num_spec_tokens is not None:
        answer["metrics"] = metrics_of(submissions.streams, options.num_spec_tokens)
    return answer


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
