"""Validation of prompt embeddings against the server's configuration and the request's other parameters."""

from __future__ import annotations

from quintet.wire.config import EngineConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.request import Echo, RequestSpec


def check_embeds(spec: RequestSpec, embeds: EmbedsPrompt, config: EngineConfig) -> None:
    """Raise `RequestError` unless the request can be served with prompt embeddings."""
    width = config.model.embedding_width
    if not config.frontend.prompt_embeds:
        raise _refusal("prompt embeddings are disabled: set enable_prompt_embeds", "prompt_embeds")
    if embeds.width != width:
        raise _refusal(
            f"its embeddings have width {embeds.width}, but the model's width is {width}", "prompt_embeds"
        )
    params = spec.params
    for name, is_set in (
        ("echo", spec.echo is not Echo.NONE),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens is not None),
    ):
        if is_set:
            raise _refusal(
                f"{name} needs a prompt's tokens, which embeddings do not have: leave one of them out", name
            )


def _refusal(reason: str, param: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"The request with prompt_embeds was refused: {reason}.", param)
