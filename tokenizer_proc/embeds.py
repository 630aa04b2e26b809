"""Whether a prompt may be vectors: with this server, and with what else the request asks for."""

from __future__ import annotations

from quintet.wire.config import EngineConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.request import Echo, RequestSpec


def check_embeds(spec: RequestSpec, embeds: EmbedsPrompt, config: EngineConfig) -> None:
    """Raise `RequestError` unless the request can be served with vectors as its prompt."""
    width = config.model.embedding_width
    if not config.frontend.prompt_embeds:
        raise _refusal("it takes no prompts as vectors: set enable_prompt_embeds", "prompt_embeds")
    if embeds.width != width:
        raise _refusal(f"its vectors have {embeds.width} numbers, the model's {width}", "prompt_embeds")
    params = spec.params
    for name, is_asked in (
        ("echo", spec.echo is not Echo.NONE),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("truncate_prompt_tokens", params.truncate_prompt_tokens is not None),
    ):
        if is_asked:
            raise _refusal(
                f"{name} needs a prompt's tokens, which vectors do not have: leave one of them out", name
            )


def _refusal(why: str, param: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"The request with prompt_embeds was refused: {why}.", param)
