"""Vectors of pooling requests: submit prompts, wait for the hidden states, normalize them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quintet.frontend.api.answer import session_of, submit_all
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.types import GenerationBody
from quintet.frontend.api.outputs import collect_outputs
from quintet.frontend.api.pooling.types import PoolingBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.frontend.streams import Stream
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Prompt
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import PoolingConfig, PoolingType
from quintet.wire.request import RequestSpec

MAX_TOGETHER = 256
"""Prompts of one HTTP request that run at the same time."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Results of one HTTP request."""

    hidden: list[bytes]
    """float32[width] of each prompt, not normalized."""
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def usage(self) -> dict[str, object]:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def pooling_of(config: ModelConfig) -> PoolingConfig:
    """Return the server's pooling. Raises `RequestError` if it has none."""
    if config.pooling is None:
        raise RequestError(
            ErrorCode.NOT_IMPLEMENTED,
            f"This server has no embeddings of `{config.served_names[0]}`. Start it with --runner pooling, or serve a folder of "
            "sentence-transformers.",
            "model",
        )
    return config.pooling


def pooling_params(pooling: PoolingConfig, **given: object) -> SamplingParams:
    """Return the parameters of pooling requests; ``given``: those that were sent. Raises `RequestError`.

    Long prompts are cut at the end, as sentence-transformers does.
    """
    values: dict[str, object] = {"truncation_side": "right"}
    values |= {name: value for name, value in given.items() if value is not None}
    reads_all = pooling.kind is PoolingType.MEAN
    params = SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=reads_all)
    return msgspec.structs.replace(params, **values).checked()


def fields_of(body: PoolingBody) -> GenerationBody:
    """Return the fields that requests for text have too."""
    return GenerationBody(
        model=body.model,
        priority=body.priority,
        cache_salt=body.cache_salt,
        request_id=body.request_id,
        timeout=body.timeout,
    )


async def pool(
    service: Service, http_request: HttpRequest, body: PoolingBody, prompts: Sequence[Prompt], field: str
) -> Vectors:
    """Return the vectors of prompts, in order. field: name of the prompts in the body, for errors.

    Raises `RequestError`, or `ClientDisconnected`; both cancel the prompts that still run.
    """
    config = service.config
    pooling = pooling_of(config.model)
    fields = fields_of(body)
    parse.check_combinations(fields, config)
    if body.stream:
        raise parse.not_implemented("stream", "streams of embeddings", "Leave it out.")
    if parse.json_of(body.mm_processor_kwargs) not in {b"", b"{}"}:
        raise parse.not_implemented("mm_processor_kwargs", "images", "Leave it out.")
    params = pooling_params(
        pooling,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
    )
    deadline_ns = parse.deadline_ns(fields, http_request)
    spec = RequestSpec(params, http_request.arrival_ns, deadline_ns=deadline_ns, pooling=pooling.kind)
    service.admission.check_number(len(prompts))
    session, streams = session_of(http_request, body.user), list[Stream]()
    together = min(MAX_TOGETHER, config.frontend.max_queued_requests)
    try:
        for begin in range(0, len(prompts), together):
            part = prompts[begin : begin + together]
            submissions = submit_all(
                service, http_request, body, part, spec, clamp_max_tokens=False, session=session
            )
            await collect_outputs(http_request, submissions)
            streams += submissions.streams
    except RequestError as error:
        raise renamed_field(error, field) from None
    starts = [stream.started for stream in streams if stream.started is not None]
    return Vectors(
        [stream.vector for stream in streams],
        sum(started.num_prompt_tokens for started in starts),
        sum(started.num_cached_tokens for started in starts),
    )


def renamed_field(error: RequestError, field: str) -> RequestError:
    """Return an error about the prompt with the prompt's name in the body."""
    if error.param != "prompt" or field == "prompt":
        return error
    message = error.message.replace("of the prompt", f"of the {field}").replace(
        "in the prompt", f"in the {field}"
    )
    message = message.replace(f"of the {field} or completion", f"of the {field}")
    if message.startswith("prompt"):
        message = field + message.removeprefix("prompt")
    return RequestError(error.code, message, field, error.retry_s)


def vector_of(hidden: bytes, *, normalize: bool, dimensions: int | None = None) -> array[float]:
    """Return float32[dimensions] of a pooled hidden state. A vector of zeros stays as it is.

    Raises `RequestError` if a component is not a finite number.
    """
    vector = array("f", hidden)
    if not all(map(math.isfinite, vector)):
        raise RequestError(
            ErrorCode.INTERNAL,
            "The model's hidden states are not finite numbers. Start the server with --dtype float32 or bfloat16.",
        )
    if dimensions is not None:
        del vector[dimensions:]
    if not normalize:
        return vector
    length = math.sqrt(math.fsum(each * each for each in vector))
    return array("f", [each / length for each in vector]) if length else vector
