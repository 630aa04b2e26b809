"""Usage of a continued response, for choices that had ended on the other server.

A prompt without running choices is not sent to the engine, and the reasoning of ended choices was not parsed here. So the
prompt is tokenized again, and the output parsed again.
"""

from __future__ import annotations

from quintet.frontend.api.answer import Submissions
from quintet.frontend.api.openai.redetokenize import redetokenize
from quintet.frontend.service import Service
from quintet.frontend.streams import Stream, StreamChoice
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import Finish, Started, TokenPrompt
from quintet.wire.request import reserved_output_tokens


async def replay_usage(service: Service, submissions: Submissions) -> None:
    """Count the choices that ended before the request arrived here. Call right after submit. Raises `RequestError`."""
    ended = [
        [(choice, choice.finish) for choice in stream.choices if choice.finish is not None]
        for stream in submissions.streams
    ]
    try:
        for stream, choices in zip(submissions.streams, ended, strict=True):
            if choices:
                await _count(service, stream, choices)
    except BaseException:
        submissions.close()
        raise


async def _count(service: Service, stream: Stream, ended: list[tuple[StreamChoice, Finish]]) -> None:
    submit, is_over = stream.submit, len(ended) == len(stream.choices)
    params, reading, arrival_ns = submit.spec.params, submit.spec.reading, submit.spec.arrival_ns
    if reading is None and not is_over:
        return  # the engine prefills its prompt and reports the length
    prompt = submit.prompt
    if isinstance(prompt, EmbedsPrompt):
        prompt_ids, num_prompt_tokens = b"", prompt.num_tokens
    else:
        encoded = prompt if isinstance(prompt, TokenPrompt) else await service.queries.tokenize(prompt)
        prompt_ids = encoded.token_ids
        num_prompt_tokens = min(len(prompt_ids) // 4, _most_tokens(service, stream))
    if is_over:
        stream.started = Started(submit.request_id, num_prompt_tokens, 0, arrival_ns, arrival_ns)
    if reading is not None:
        for choice, finish in ended:
            read = await redetokenize(service, choice.output_ids.tolist(), True, params, prompt_ids, reading)
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
