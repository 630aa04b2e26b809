"""Answers by beam search: rounds of single-token requests (`quintet.frontend.beam_search`).

The engine then replays the found beams as ordinary output, so that text, parsers and usage are the same as for sampled
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from quintet.frontend.api.answer import Submissions, echo_of, stream_answer
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import ChunkWriter
from quintet.frontend.api.openai.best_of import num_returned
from quintet.frontend.api.openai.generation import GenerationRequest
from quintet.frontend.api.openai.prompts import token_ids_of
from quintet.frontend.api.openai.structured import form_field
from quintet.frontend.api.openai.types import ChatBody, GenerationBody
from quintet.frontend.api.outputs import collect_outputs
from quintet.frontend.beam_search import Beam, BeamOptions, EarlyStopping, output_limit, replay_params, search
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.frontend.streams import Batch, Stream
from quintet.wire.codec import pack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import invalid
from quintet.wire.messages import PositionLogprobs, TokenPrompt
from quintet.wire.params import GREEDY_VALUES, TEXT_PARAMS, SamplingParams
from quintet.wire.request import RequestSpec, adapter_digest

WITH_BEAMS = {
    *("n", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "spaces_between_special_tokens"),
    *("truncation_side", *GREEDY_VALUES, *TEXT_PARAMS),
} - {"stop", "min_tokens"}
"""Sampling parameters allowed with beam search: those with an effect, and random draws, which it replaces."""
NEUTRAL_VALUES: Mapping[str, object] = {
    name: default
    for name, default in msgspec.structs.asdict(SamplingParams()).items()
    if name in GenerationBody.__struct_fields__ and name not in WITH_BEAMS | {"structured_outputs"}
}
"""Fields without effect in beam search, and the neutral values of their parameters."""

_early_stopping: msgspec.json.Decoder[EarlyStopping] = msgspec.json.Decoder(bool | Literal["never"])


async def answer_beams(service: Service, http_request: HttpRequest, request: GenerationRequest) -> None:
    """Search, and answer with the found beams; the winners are known only at the end."""
    submissions, beams = await _search_beams(service, http_request, request)
    answer = request.answer
    if request.body.stream:
        options = msgspec.structs.replace(answer.options, num_choices=1)  # each beam has a prompt of its own
        replays = msgspec.structs.replace(answer, num_prompts=len(beams), num_choices=1, options=options)
        chunks = ChunkWriter(replays)
        chunks.streams_per_prompt = submissions.streams_per_prompt
        await stream_answer(service, http_request, submissions, BeamsWriter(chunks, beams))
        return
    outputs = await collect_outputs(http_request, submissions)
    for output, beam in zip(outputs, beams, strict=True):
        output.logprobs = beam.positions
    await http_request.respond_json(answer.whole(outputs, submissions))


class BeamsWriter:
    """Writer of found beams, with the log-probabilities of the search."""

    def __init__(self, chunks: ChunkWriter, beams: Sequence[Beam]) -> None:
        self._chunks = chunks
        self._beams = beams
        self.state = chunks.state
        self.tail, self.failed, self.silence = chunks.tail, chunks.failed, chunks.silence

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """See `AnswerWriter`. A beam arrives in one batch."""
        for delta in batch.deltas:
            if self._chunks.options.logprobs is not None:
                delta.logprobs = self._beams[position].positions
        self._chunks.write(frames, position, stream, batch)


async def _search_beams(
    service: Service, http_request: HttpRequest, request: GenerationRequest
) -> tuple[Submissions, list[Beam]]:
    """Search, and return the submissions that replay the found beams, and the beams of each prompt, best first."""
    body, params = request.body, request.params
    _check_beams(body, params)
    n = num_returned(body)
    prompts = []
    for prompt in request.prompts:
        assert not isinstance(prompt, EmbedsPrompt), "embeds_prompts rejects use_beam_search"
        prompts.append(await token_ids_of(service, prompt, request.field))
    options = [_options(request, len(prompt), service.config.model) for prompt in prompts]
    service.admission.check(request.prompts, msgspec.structs.replace(params, n=options[0].width))

    async def ask(extended: Sequence[TokenPrompt], step: SamplingParams) -> list[PositionLogprobs]:
        submissions = Submissions()
        _submit(service, submissions, request, [(prompt, step, b"") for prompt in extended])
        return [output.logprobs[0] for output in await collect_outputs(http_request, submissions)]

    found = [beams[:n] for beams in await search(prompts, options, ask)]
    submissions = Submissions(streams_per_prompt=n)
    replays = [
        (TokenPrompt(pack_i32(ids)), replay_params(beam, params), pack_i32(beam.token_ids))
        for ids, beams in zip(prompts, found, strict=True)
        for beam in beams
    ]
    _submit(service, submissions, request, replays)
    return submissions, [beam for beams in found for beam in beams]


def _options(request: GenerationRequest, num_prompt: int, model: ModelConfig) -> BeamOptions:
    body, params, answer = request.body, request.params, request.answer.options
    max_tokens = None if request.clamp_max_tokens else params.max_tokens
    num_left = output_limit(num_prompt, max_tokens, model.max_model_len, request.field)
    return BeamOptions(
        body.best_of or num_returned(body),
        min(num_left, params.max_tokens or num_left),
        1.0 if body.length_penalty is None else body.length_penalty,
        _early_stopping_of(body),
        frozenset(params.end_tokens(model.eos_token_ids)),
        0 if answer.logprobs is None else answer.max_alternatives,
        "n" if body.best_of is None else "best_of",
    )


def _submit(
    service: Service,
    submissions: Submissions,
    request: GenerationRequest,
    each: Sequence[tuple[TokenPrompt, SamplingParams, bytes]],
) -> None:
    body = request.body
    with submissions:
        for prompt, params, replayed_ids in each:
            submissions.add(
                service.requests.submit(
                    prompt,
                    RequestSpec(
                        params,
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                        adapter=adapter_digest(service.config.model, body.model),
                        echo=echo_of(prompt, request.echoes_prompt and bool(replayed_ids)),
                        return_prompt_ids=bool(body.return_token_ids and replayed_ids),
                        deadline_ns=request.deadline_ns,
                        parsing=request.parsing if replayed_ids else None,
                        output_ids=replayed_ids,
                        replays=bool(replayed_ids),
                    ),
                    mailbox=submissions.mailbox,
                    interval=None,
                    session=request.session,
                )
            )


def _early_stopping_of(body: GenerationBody) -> EarlyStopping:
    encoded = parse.json_of(body.early_stopping)
    if not encoded:
        return False
    try:
        return _early_stopping.decode(encoded)
    except msgspec.ValidationError:
        raise invalid(
            f"early_stopping is {encoded.decode()}; it must be true, false or 'never'.", "early_stopping"
        ) from None


def _check_beams(body: GenerationBody, params: SamplingParams) -> None:
    """Reject fields that have no effect in beam search."""
    for name, nothing in NEUTRAL_VALUES.items():
        if getattr(body, name) is not None and getattr(params, name) not in (nothing, {}):
            raise _no_effect_with_beams(name)
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        raise _no_effect_with_beams("tool_choice")
    if (field := form_field(body)) is not None:
        raise _no_effect_with_beams(field)


def _no_effect_with_beams(name: str) -> Exception:
    return invalid(f"{name} has no effect with use_beam_search; leave one of them out.", name)
