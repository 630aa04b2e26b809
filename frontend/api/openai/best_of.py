"""Beam search and ``best_of``: the best of more choices than are returned.

Beam search runs rounds of single-token requests (`quintet.frontend.beam_search`). The engine then replays the found beams as
ordinary output, so that text, parsers and usage are the same as for sampled output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from quintet.frontend.api.answer import Submissions, echo_of, stream_answer
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import AnswerOptions, ChunkWriter
from quintet.frontend.api.openai.structured import form_field
from quintet.frontend.api.openai.types import SHARED_SAMPLING_FIELDS, ChatBody, CompletionBody, GenerationBody
from quintet.frontend.api.outputs import Output, collect_outputs
from quintet.frontend.beam_search import Beam, BeamOptions, EarlyStopping, output_limit, replay_params, search
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.frontend.streams import Batch, Stream
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import invalid
from quintet.wire.messages import PositionLogprobs, Prompt, TokenPrompt
from quintet.wire.params import GREEDY_VALUES, SamplingParams, shown
from quintet.wire.request import OutputParsing, RequestSpec, adapter_digest

WITH_BEAMS = frozenset(
    {
        "n", "seed", "max_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "truncation_side", *GREEDY_VALUES,
    }
)  # fmt: skip
"""Sampling parameters allowed with beam search: those with an effect, and random draws, which it replaces."""
NEUTRAL_VALUES: Mapping[str, object] = {
    name: default
    for name, default in msgspec.structs.asdict(SamplingParams()).items()
    if name in SHARED_SAMPLING_FIELDS and name not in WITH_BEAMS
} | {"thinking_token_budget": -1}
"""Fields without effect in beam search, and their neutral values."""

_early_stopping: msgspec.json.Decoder[EarlyStopping] = msgspec.json.Decoder(bool | Literal["never"])


@dataclass(frozen=True, slots=True)
class BeamRequest:
    """A checked request for beam search."""

    prompts: Sequence[Prompt]
    body: GenerationBody
    params: SamplingParams
    field: str
    """Name of the prompt field."""
    clamp_max_tokens: bool
    """True if ``max_tokens`` is only an upper bound."""
    answer: AnswerOptions
    deadline_ns: int
    session: str
    parsing: OutputParsing | None = None

    @property
    def num_shown(self) -> int:
        """Alternatives returned per position; 0 without log-probabilities."""
        return 0 if self.answer.logprobs is None else self.answer.max_alternatives


def rankable(params: SamplingParams, body: GenerationBody) -> SamplingParams:
    """Return parameters with log-probabilities if `best_choices` needs them. Raises `RequestError`."""
    if not _drops_choices(body):
        return params
    if body.stream:
        raise invalid(
            f"best_of is {body.best_of} and stream is true; the best choices are known only at the end. Set stream to "
            "false, or best_of to n.",
            "best_of",
        )
    return params if params.logprobs is not None else msgspec.structs.replace(params, logprobs=0)


def best_choices(outputs: Sequence[Output], body: GenerationBody) -> list[Output]:
    """Return the ``n`` of each prompt's ``best_of`` choices with the highest total log-probability, best first."""
    if not _drops_choices(body):
        return list(outputs)
    n, best_of = body.n or 1, body.best_of or 1
    chosen: list[Output] = []
    for first in range(0, len(outputs), best_of):
        each = outputs[first : first + best_of]
        chosen += sorted(each, key=lambda output: -sum(p.chosen.logprob for p in output.logprobs))[:n]
    for index, output in enumerate(chosen):
        output.index = index
    return chosen


def _drops_choices(body: GenerationBody) -> bool:
    return body.best_of is not None and not body.use_beam_search and body.best_of > _num_shown(body)


async def beam_answer(
    service: Service, http_request: HttpRequest, request: BeamRequest
) -> tuple[list[Output], Submissions]:
    """Search, and return the choices of each prompt, best first, with their submissions."""
    submissions, beams = await _search_beams(service, http_request, request)
    outputs = await collect_outputs(http_request, submissions)
    for output, beam in zip(outputs, beams, strict=True):
        output.logprobs = beam.positions
    return outputs, submissions


async def stream_beams(
    service: Service,
    http_request: HttpRequest,
    request: BeamRequest,
    writer: Callable[[AnswerOptions, int], ChunkWriter],
) -> None:
    """Search, then stream the found beams; the winners are known only at the end.

    ``writer``: makes the event writer from options and number of choices; each choice is formatted as the only one of a prompt.
    """
    submissions, beams = await _search_beams(service, http_request, request)
    chunks = writer(msgspec.structs.replace(request.answer, num_choices=1), len(beams))
    chunks.streams_per_prompt = submissions.streams_per_prompt
    await stream_answer(service, http_request, submissions, BeamsWriter(chunks, beams))


class BeamsWriter:
    """Writer of found beams, with the log-probabilities of the search."""

    def __init__(self, chunks: ChunkWriter, beams: Sequence[Beam]) -> None:
        self._chunks = chunks
        self._beams = beams
        self.tail, self.failed = chunks.tail, chunks.failed
        self.silence, self.headers = chunks.silence, chunks.headers

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """See `AnswerWriter`. A beam arrives in one batch."""
        for delta in batch.deltas:
            if self._chunks.options.logprobs is not None:
                delta.logprobs = self._beams[position].positions
        self._chunks.write(frames, position, stream, batch)


async def _search_beams(
    service: Service, http_request: HttpRequest, request: BeamRequest
) -> tuple[Submissions, list[Beam]]:
    """Search, and return the submissions that replay the found beams, and the beams of each prompt, best first."""
    body, params = request.body, request.params
    _check_beams(body)
    n = _num_shown(body)
    prompts = [await _ids_of(service, prompt, request.field) for prompt in request.prompts]
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


def _options(request: BeamRequest, num_prompt: int, model: ModelConfig) -> BeamOptions:
    body, params = request.body, request.params
    max_tokens = None if request.clamp_max_tokens else params.max_tokens
    num_left = output_limit(num_prompt, max_tokens, model.max_model_len, request.field)
    return BeamOptions(
        body.best_of or _num_shown(body),
        min(num_left, params.max_tokens or num_left),
        1.0 if body.length_penalty is None else body.length_penalty,
        _early_stopping_of(body),
        frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else model.eos_token_ids),
        request.num_shown,
        "n" if body.best_of is None else "best_of",
    )


def _submit(
    service: Service,
    submissions: Submissions,
    request: BeamRequest,
    each: Sequence[tuple[TokenPrompt, SamplingParams, bytes]],
) -> None:
    has_echo = request.answer.echo and isinstance(request.body, CompletionBody)
    try:
        for prompt, params, replayed_ids in each:
            submissions.add(
                service.requests.submit(
                    prompt,
                    RequestSpec(
                        params,
                        priority=request.body.priority or 0,
                        cache_salt=request.body.cache_salt or "",
                        adapter=adapter_digest(service.config.model, request.body.model),
                        echo=echo_of(prompt, has_echo and bool(replayed_ids)),
                        return_prompt_ids=request.answer.return_token_ids and bool(replayed_ids),
                        deadline_ns=request.deadline_ns,
                        parsing=request.parsing if replayed_ids else None,
                        output_ids=replayed_ids,
                        replays=bool(replayed_ids),
                    ),
                    mailbox=submissions.mailbox,
                    final_only=True,
                    session=request.session,
                )
            )
    except BaseException:
        submissions.close()
        raise


async def _ids_of(service: Service, prompt: Prompt, field: str) -> list[int]:
    assert not isinstance(prompt, EmbedsPrompt), "embeds_prompts rejects use_beam_search"
    if isinstance(prompt, TokenPrompt):
        return list(unpack_i32(prompt.token_ids))
    ids = list(unpack_i32((await service.queries.tokenize(prompt)).token_ids))
    if not ids:
        raise invalid(f"{field} is empty: it has no tokens; send at least one token.", field)
    return ids


def _num_shown(body: GenerationBody) -> int:
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of < n:
        raise invalid(f"best_of is {shown(body.best_of)}; it must be at least n ({n}).", "best_of")
    return n


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


def _check_beams(body: GenerationBody) -> None:
    """Reject fields that have no effect in beam search."""
    for name, nothing in NEUTRAL_VALUES.items():
        value = getattr(body, name)
        if value is not None and value not in (nothing, {}):
            raise _no_effect_with_beams(name)
    if isinstance(body, ChatBody) and body.tool_choice not in (None, "none", "auto"):
        raise _no_effect_with_beams("tool_choice")
    if (field := form_field(body)) is not None:
        raise _no_effect_with_beams(field)


def _no_effect_with_beams(name: str) -> Exception:
    return invalid(f"{name} has no effect with use_beam_search; leave one of them out.", name)
