"""POST …/derender: translate a response of `/inference/v1/generate` to that of the rendered request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.channels import channels_of
from quintet.frontend.api.inference.types import (
    DerenderChatBody,
    DerenderCompletionBody,
    Generated,
    GeneratedChoice,
)
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import AnswerOptions, finish_name, reason_named
from quintet.frontend.api.openai.chat import ChatAnswer, message_of
from quintet.frontend.api.openai.chat_body import checked_chat
from quintet.frontend.api.openai.completions import completion_params
from quintet.frontend.api.openai.redetokenize import redetokenize
from quintet.frontend.api.openai.types import ChatBody, CompletionBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import Detokenized, Finish, FinishReason
from quintet.wire.params import SamplingParams, check_token_ids, shown
from quintet.wire.request import OutputParsing, name_in_responses

MAX_CHOICES = 256
"""Maximum choices per request: they are detokenized sequentially."""

_chat_decoder = msgspec.json.Decoder(DerenderChatBody)
_completion_decoder = msgspec.json.Decoder(DerenderCompletionBody)
_chat_request_decoder = msgspec.json.Decoder(ChatBody)
_completion_request_decoder = msgspec.json.Decoder(CompletionBody)


async def derender_chat(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _chat_decoder)
    generated = body.generate_response
    _check([generated], body.stream, config)
    options = _options("chatcmpl", generated, body.model, http_request, config)
    how = ChatAnswer(1, 1, 1, options, "assistant", "")
    params = SamplingParams()
    parsing = None
    prompt_ids = b""
    given = parse.json_of(body.chat_request)
    if given:
        chat = parse.decode(given, _chat_request_decoder)
        conversation, params, parsing = checked_chat(chat, config)
        prompt_ids = (await service.queries.tokenize(conversation.prompt)).token_ids
        how.role, how.prefix = conversation.role, conversation.last_text if chat.echo else ""
        if parsing is not None:
            how.channels = channels_of(chat, conversation, options.response_id, config, http_request)
    choices: list[dict[str, object]] = []
    num_reasoning = 0
    for choice in generated.choices:
        answer = await _read(service, choice, params, prompt_ids, parsing)
        num_reasoning += answer.num_reasoning_tokens
        message = message_of(choice.index, answer.text, answer.spans, how)
        choices.append(_choice(choice, answer, {"message": message}))
    given_counts = None if body.prompt_tokens is None else [body.prompt_tokens]
    usage = _usage([generated], [len(unpack_i32(prompt_ids))] if given else given_counts)
    if parsing is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    answer_body = {**options.head("chat.completion"), "choices": choices, "usage": usage}
    await http_request.respond_json({**answer_body, "prompt_logprobs": _raw_json(generated.prompt_logprobs)})


async def derender_completions(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _completion_decoder)
    answers = body.generate_responses
    if not answers or len(body.prompt_tokens or answers) != len(answers):
        raise invalid(
            f"generate_responses has {len(answers)} responses and prompt_tokens {len(body.prompt_tokens or ())} numbers; send "
            "at least one response, and one number for each or none.",
            "prompt_tokens",
        )
    _check(answers, body.stream, config)
    params, given = SamplingParams(), parse.json_of(body.completion_request)
    if given:
        request = parse.decode(given, _completion_request_decoder)
        params = completion_params(request, config)
        if request.echo:
            raise parse.not_implemented("echo", "echo in derendered responses", "Leave it out.")
    options = _options("cmpl", answers[0], body.model, http_request, config)
    choices: list[dict[str, object]] = []
    for generated in answers:
        for choice in generated.choices:
            answer = await _read(service, choice, params, b"", None)
            fields = _choice(choice, answer, {"text": answer.text})
            choices.append(
                {**fields, "index": len(choices), "prompt_logprobs": _raw_json(generated.prompt_logprobs)}
            )
    usage = _usage(answers, body.prompt_tokens)
    await http_request.respond_json({**options.head("text_completion"), "choices": choices, "usage": usage})


def _check(answers: Sequence[Generated], stream: bool | None, config: EngineConfig) -> None:
    if stream:
        raise invalid(
            "stream is true, but derendered responses are not streamed; set stream to false.", "stream"
        )
    choices = [choice for generated in answers for choice in generated.choices]
    if len(choices) > MAX_CHOICES:
        raise invalid(f"{len(choices)} choices were sent; send at most {MAX_CHOICES}.", "choices")
    for choice in choices:
        ids = choice.token_ids or ()
        if len(ids) > config.model.max_model_len:
            raise invalid(
                f"token_ids has {len(ids)} ids; the maximum for this model is {config.model.max_model_len}.",
                "token_ids",
            )
        check_token_ids(ids, config.model.vocab_size, "token_ids")
        if choice.finish_reason is not None and reason_named(choice.finish_reason) is None:
            raise invalid(
                f"finish_reason is {shown(choice.finish_reason)}; it must be a value of /inference/v1/generate.",
                "finish_reason",
            )


def _options(
    prefix: str, generated: Generated, model: str | None, http_request: HttpRequest, config: EngineConfig
) -> AnswerOptions:
    given = generated.request_id
    fields = CompletionBody(request_id=given.removeprefix(f"{prefix}-") if given else None)
    response_id = f"{prefix}-{parse.request_id(fields, http_request)}"
    return AnswerOptions(response_id, int(time.time()), name_in_responses(config.model, model), 1)


async def _read(
    service: Service,
    choice: GeneratedChoice,
    params: SamplingParams,
    prompt_ids: bytes,
    parsing: OutputParsing | None,
) -> Detokenized:
    ends_with_stop = choice.finish_reason in ("stop", "tool_calls")
    is_cut = choice.finish_reason is not None and not ends_with_stop
    ids = choice.token_ids or ()
    return await redetokenize(service, ids, ends_with_stop, params, prompt_ids, parsing, is_cut=is_cut)


def _choice(choice: GeneratedChoice, answer: Detokenized, fields: dict[str, object]) -> dict[str, object]:
    reason = reason_named(choice.finish_reason) or FinishReason.STOP
    finish = Finish(0, reason, choice.stop_reason, 0, answer.num_reasoning_tokens, answer.num_calls)
    return {
        "index": choice.index,
        **fields,
        "logprobs": _raw_json(choice.logprobs),
        "finish_reason": finish_name(finish),
        "stop_reason": choice.stop_reason,
    }


def _raw_json(raw: msgspec.Raw | msgspec.UnsetType) -> object:
    return msgspec.Raw(parse.json_of(raw) or b"null")


def _usage(answers: Sequence[Generated], prompt_tokens: Sequence[int] | None) -> dict[str, object]:
    """Return the usage; prompt tokens come from the responses unless given."""
    num_prompt = sum(
        [generated.usage.prompt_tokens for generated in answers if generated.usage]
        if prompt_tokens is None
        else prompt_tokens
    )
    num_outputs = sum(len(choice.token_ids or ()) for generated in answers for choice in generated.choices)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_outputs,
        "completion_tokens": num_outputs,
    }
