"""Answers to checked requests for completions, chat completions and token ids, without beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.api.answer import stream_answer, submit_all
from quintet.frontend.api.openai.answer import ChunkAnswer, ChunkWriter
from quintet.frontend.api.openai.best_of import best_choices, rankable
from quintet.frontend.api.openai.kv_transfer_params import with_params
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.api.openai.types import CompletionBody, GenerationBody
from quintet.frontend.api.outputs import collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.messages import Prompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, KvTransfer, OutputParsing, RequestSpec


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request."""

    body: GenerationBody
    prompts: Sequence[Prompt]
    field: str
    """Name of the prompt field."""
    params: SamplingParams
    answer: ChunkAnswer
    clamp_max_tokens: bool
    """True if ``max_tokens`` is only an upper bound."""
    deadline_ns: int
    session: str
    parsing: OutputParsing | None = None
    kv_transfer: KvTransfer | None = None

    @property
    def echoes_prompt(self) -> bool:
        """True if the engine returns the prompt. An echo in chat is the last message."""
        return self.answer.options.echo and isinstance(self.body, CompletionBody)


async def answer_generation(service: Service, http_request: HttpRequest, request: GenerationRequest) -> None:
    """Generate and answer, as a stream or at the end."""
    body, answer = request.body, request.answer
    submissions = submit_all(
        service,
        http_request,
        body,
        request.prompts,
        RequestSpec(
            request.params if body.best_of is None else rankable(request.params, body),
            http_request.arrival_ns,
            deadline_ns=request.deadline_ns,
            parsing=request.parsing,
            echo=Echo(request.echoes_prompt),
            return_prompt_ids=bool(body.return_token_ids),
            kv_transfer=request.kv_transfer,
        ),
        answer=answer,
        clamp_max_tokens=request.clamp_max_tokens,
        session=request.session,
    )
    if http_request.partial_response is not None and answer.options.include_usage:
        await replay_usage(service, submissions)
    if body.stream:
        writer = ChunkWriter(answer, submissions.stream_id, submissions.position)
        await stream_answer(service, http_request, submissions, writer)
    else:
        outputs = best_choices(await collect_outputs(http_request, submissions), body)
        whole = answer.whole(outputs, submissions)
        await http_request.respond_json(with_params(whole, submissions.streams, service.config))
