"""Prefill-decode disaggregation: one server computes the prompt, another one the answer (docs/disaggregation.md).

`Servers.choose_for_prompt` decides whether to disaggregate and selects the prefill server. After any failure, the
request is sent unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from quintet.deploy.http_client.connection import HttpAnswer
from quintet.deploy.http_client.pool import Unreachable
from quintet.deploy.router.attempts import Attempt
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import HeldPrefixes, Servers
from quintet.deploy.router.upstream import Outgoing
from quintet.wire.codec import UNREADABLE

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths that accept the parameters of a KV transfer."""
PROMPT_S = 60.0
"""Timeout of the prefill request."""
PARAMS = "kv_transfer_params"
_UNSUPPORTED = frozenset({PARAMS, "use_beam_search", "prompt_logprobs", "echo", "truncate_prompt_tokens"})
"""Fields that prevent disaggregation: transferred blocks cannot be used, or the client controls the transfer."""
_OUTPUT_FIELDS = {
    *(
        "stream",
        "stream_options",
        "stream_interval",
        "n",
        "best_of",
        "min_tokens",
        "logprobs",
        "top_logprobs",
    ),
    "max_completion_tokens",
}
"""Fields removed from the prefill request, which generates one token."""
_OFF = (b"null", b"false", b"{}")
_log = logging.getLogger("quintet")
Fields = dict[str, msgspec.Raw]
_fields_decoder = msgspec.json.Decoder(Fields)


class _Computed(msgspec.Struct):
    """Parsed part of the prefill server's answer."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


async def prefill_remotely(
    servers: Servers,
    metrics: RouterMetrics,
    outgoing: Outgoing,
    summary: RequestSummary,
    held: HeldPrefixes,
    enter: Callable[[Attempt | None], None],
    lose: Callable[[], None],
) -> Outgoing:
    """Compute the prompt on another server if worthwhile; return the request for the decode server.

    ``enter`` is called with the prefill attempt, then with None. ``lose`` is called if the prefill server was lost.
    """
    chosen = servers.choose_for_prompt(summary, held) if outgoing.path in PATHS else None
    if chosen is None:
        return outgoing
    fields = _fields_of(outgoing.body)
    if fields is None:
        chosen.release()
        return outgoing
    attempt, params = Attempt(chosen), b""
    try:
        enter(attempt)
        async with asyncio.timeout(PROMPT_S):
            flow = await attempt.send(replace(outgoing, body=_first(fields), extra=()))
            params = _params_of(await flow.whole)
        metrics.answered(chosen.server, flow.status)
    except Unreachable as error:
        chosen.server.set_trouble(str(error))
    except TimeoutError:
        _log.warning(
            "%s: prefill of request %s timed out after %g s", chosen.server.url, outgoing.request_id, PROMPT_S
        )
    except ConnectionError as error:
        _log.info("%s: %s during prefill of request %s", chosen.server.url, error, outgoing.request_id)
        lose()
    finally:
        enter(None)
        attempt.release()
    metrics.prefills[bool(params)].inc()
    if not params:
        return outgoing
    return replace(outgoing, body=msgspec.json.encode(fields | {PARAMS: msgspec.Raw(params)}))


def _fields_of(body: bytes) -> Fields | None:
    """Return the fields of a request that can be disaggregated; None otherwise."""
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE:
        return None
    if any(bytes(fields.get(name, _OFF[0])) not in _OFF for name in _UNSUPPORTED):
        return None
    prompt = bytes(fields.get("prompt", b""))
    has_several = prompt.startswith(b"[") and not prompt[1:].lstrip()[:1].isdigit()
    return None if has_several else fields


def _first(fields: Fields) -> bytes:
    """Build the body of the prefill request."""
    kept: dict[str, object] = {name: raw for name, raw in fields.items() if name not in _OUTPUT_FIELDS}
    return msgspec.json.encode({**kept, "max_tokens": 1, "stream": False, PARAMS: {"do_remote_decode": True}})


def _params_of(answer: HttpAnswer) -> bytes:
    """Return the KV transfer parameters for the decode server; empty if the prefill failed."""
    if answer.status != 200:
        return b""
    try:
        params = bytes(msgspec.json.decode(answer.body, type=_Computed).kv_transfer_params)
    except UNREADABLE:
        return b""
    return b"" if params == b"null" else params
