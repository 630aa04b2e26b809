"""Detokenize known output as if it were generated: stop strings, parsers and special tokens apply."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.service import Service
from quintet.wire.messages import PROMPT_TAIL, Detokenized, Open
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, OutputParsing


async def redetokenize(
    service: Service,
    ids: Sequence[int],
    ends_with_stop: bool,
    params: SamplingParams,
    prompt_ids: bytes,
    reading: OutputParsing | None,
    *,
    is_cut: bool = False,
) -> Detokenized:
    """Decode output ids after their prompt (int32). ``is_cut``: a limit ended it, not the model.

    The stop token is dropped unless include_stop_str_in_output.
    """
    stops = {*params.stop_token_ids, *service.config.model.eos_token_ids}
    if ends_with_stop and ids and ids[-1] in stops and not params.include_stop_str_in_output:
        ids = ids[:-1]
    opened = Open(
        request_id=0,
        num_prompt_tokens=len(prompt_ids) // 4,
        num_cached_tokens=0,
        prompt_ids=prompt_ids[-4 * PROMPT_TAIL :],
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        detokenize=True,
        echo=Echo.NONE,
        return_prompt_ids=False,
        min_tokens=params.min_tokens,
        arrival_ns=0,
        scheduled_ns=0,
        reading=reading,
    )
    return await service.queries.read_output(ids, opened, is_cut=is_cut)
