"""Detokenize known output as if it were generated: stop strings, parsers and special tokens apply.

`replay_usage` returns the usage of a continued response, for choices that had ended on the other server. A prompt
without running choices is not sent to the engine, and the reasoning of ended choices was not parsed here. So the
prompt is tokenized again, and the output parsed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.api.answer import Submissions
from quintet.frontend.service import Service
from quintet.frontend.streams import Stream, StreamChoice
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import PROMPT_TAIL, Detokenized, Finish, Open, Started, TokenPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, OutputParsing, reserved_output_tokens


async def redetokenize(
    service: Service,
    ids: Sequence[int],
    ends_with_stop: bool,
    params: SamplingParams,
    prompt_ids: bytes,
    parsing: OutputParsing | None,
    *,
    is_cut: bool = False,
) -> Detokenized:
    """Decode output ids after their prompt (int32). ``is_cut``: a limit ended it, not the model.

    The stop token is dropped unless include_stop_str_in_output.
    """
    stops = params.end_tokens(service.config.model.eos_token_ids)
    if ends_with_stop and ids and ids[-1] in stops and not params.include_stop_str_in_output:
        ids = ids[:-1]
    opened = Open(
        request_id=0,
        num_prompt_tokens=len(prompt_ids) // 4,
        num_cached_tokens=0,
        prompt_ids=prompt_ids[-4 * PROMPT_TAIL :],
        **params.text_params | {"detokenize": True},
        echo=Echo.NONE,
        return_prompt_ids=False,
        arrival_ns=0,
        scheduled_ns=0,
        parsing=parsing,
    )
    return await service.queries.read_output(ids, opened, is_cut=is_cut)


async def replay_usage(service: Service, submissions: Submissions) -> None:
    """Count the choices that ended before the request arrived here. Call right after submit. Raises `RequestError`."""
    ended = [
        [(choice, choice.finish) for choice in stream.choices if choice.finish is not None]
        for stream in submissions.streams
    ]
    with submissions:
        for stream, choices in zip(submissions.streams, ended, strict=True):
            if choices:
                await _count(service, stream, choices)


async def _count(service: Service, stream: Stream, ended: list[tuple[StreamChoice, Finish]]) -> None:
    submit, is_over = stream.submit, len(ended) == len(stream.choices)
    params, parsing, arrival_ns = submit.spec.params, submit.spec.parsing, submit.spec.arrival_ns
    if parsing is None and not is_over:
        return  # the engine prefills its prompt and reports the length
    prompt = submit.prompt
    if isinstance(prompt, EmbedsPrompt):
        prompt_ids, num_prompt_tokens = b"", prompt.span.num_tokens
    else:
        encoded = prompt if isinstance(prompt, TokenPrompt) else await service.queries.tokenize(prompt)
        prompt_ids = encoded.token_ids
        num_prompt_tokens = min(len(prompt_ids) // 4, _most_tokens(service, stream))
    if is_over:
        stream.started = Started(submit.request_id, num_prompt_tokens, 0, arrival_ns, arrival_ns)
    if parsing is not None:
        for choice, finish in ended:
            read = await redetokenize(service, choice.output_ids.tolist(), True, params, prompt_ids, parsing)
            finish.num_reasoning_tokens = read.num_reasoning_tokens


def _most_tokens(service: Service, stream: Stream) -> int:
    """Return the maximum prompt length under the request's truncation."""
    limit, params = service.config.model.max_model_len, stream.submit.spec.params
    keep = params.truncate_prompt_tokens
    if keep is None:
        return limit
    if keep != -1:
        return keep
    return max(1, limit - reserved_output_tokens(params.max_tokens, stream.submit.clamp_max_tokens, limit))
