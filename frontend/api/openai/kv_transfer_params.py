"""``kv_transfer_params``: prefill and decode of one request on two servers (disaggregation).

Field names are those of proxies for vLLM. The prefill server receives ``do_remote_decode`` and answers with the params for
the decode server, which the proxy forwards unchanged::

    {"do_remote_prefill": true, "do_remote_decode": false, "remote_host": "10.0.0.5", "remote_port": 5600,
     "remote_engine_id": "10.0.0.5:5600", "remote_block_ids": [0, 1, …]}

Blocks are looked up by content hash; only the number of ids is used.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.types import GenerationBody
from quintet.frontend.streams import Stream
from quintet.wire.config import EngineConfig, KvPeersConfig
from quintet.wire.errors import RequestError, invalid
from quintet.wire.kv_events import address_for
from quintet.wire.messages import FinishReason
from quintet.wire.params import shown
from quintet.wire.request import MAX_PEER_CHARS, KvTransfer

FIELD = "kv_transfer_params"
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class TransferParams(msgspec.Struct, kw_only=True):
    """The fields that this server reads."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[int] | None = None


_decoder = msgspec.json.Decoder(TransferParams)


def take_kv_transfer(body: GenerationBody, num_prompts: int, config: EngineConfig) -> KvTransfer | None:
    """Remove the field from a body and decode it; None if empty. Raises `RequestError`."""
    encoded = parse.json_of(body.kv_transfer_params)
    if encoded in {b"", b"{}"}:
        return None
    params = parse.decode_part(body.kv_transfer_params, _decoder, FIELD)
    if params.do_remote_prefill is None and params.do_remote_decode is None:
        raise _wrong("has neither do_remote_prefill nor do_remote_decode; send one of them, or leave it out")
    body.kv_transfer_params = msgspec.UNSET
    if not (params.do_remote_prefill or params.do_remote_decode):
        return None
    if params.do_remote_prefill and params.do_remote_decode:
        raise _wrong("do_remote_prefill and do_remote_decode are both true; set one of them to false")
    if num_prompts > 1 or body.use_beam_search:
        raise _wrong("requires one prompt and no beam search; send each prompt as a separate request")
    peers = config.cache.peers
    if params.do_remote_decode:
        return _prefill_transfer(body, peers)
    return _decode_transfer(params, peers)


def _prefill_transfer(body: GenerationBody, peers: KvPeersConfig | None) -> KvTransfer:
    if peers is None or not peers.listen:
        raise _role_missing("do_remote_decode", "offers no KV", "prefill", peers)
    if body.stream:
        raise _wrong("do_remote_decode requires an unstreamed response; set stream to false")
    return KvTransfer(offers=True)


def _decode_transfer(params: TransferParams, peers: KvPeersConfig | None) -> KvTransfer:
    if peers is None or not peers.allowed:
        raise _role_missing("do_remote_prefill", "fetches no KV", "decode", peers)
    host, port = (params.remote_host or "").strip("[]"), params.remote_port or 0
    if not 0 < len(host) < MAX_PEER_CHARS - 10 or not 0 < port < 1 << 16:
        raise _wrong(
            f"remote_host is {shown(params.remote_host)} and remote_port {shown(params.remote_port)}; send the values that the "
            "prefill server returned"
        )
    if not _is_allowed(host, peers.allowed):
        raise _wrong(
            f"remote_host is {shown(host)}, but KV is fetched only from {', '.join(peers.allowed)}; the operator can "
            "allow it with --kv-peers"
        )
    ids = params.remote_block_ids
    most = 1 << 30
    return KvTransfer(
        peer=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        num_blocks=most if ids is None else len(ids),
    )


def _is_allowed(host: str, allowed: Sequence[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in allowed
    if "%" in host:  # ZeroMQ would parse any text after a zone
        return False
    return any(address in network for network in map(_network, allowed) if network is not None)


def _network(allowed: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(allowed)
    except ValueError:
        return None


def _wrong(words: str) -> RequestError:
    return invalid(f"{FIELD}: {words}.", FIELD)


def _role_missing(sent: str, what: str, role: str, peers: KvPeersConfig | None) -> RequestError:
    mine = "no --role" if peers is None else f"--role {peers.role}"
    return _wrong(
        f"{sent} is true, but this server, with {mine}, {what}; leave it out, or start the server with --role {role} or both"
    )


def with_params(
    answer: dict[str, object], streams: Sequence[Stream], config: EngineConfig
) -> dict[str, object]:
    """Add the params for the decode server to an unstreamed response, if the request asks for them."""
    kv_transfer, peers = streams[0].submit.spec.kv_transfer, config.cache.peers
    if peers is None or kv_transfer is None or not kv_transfer.offers:
        return answer
    return answer | {FIELD: _params_of(streams[0], peers, config.model.kv.block_size)}


def _params_of(stream: Stream, peers: KvPeersConfig, block_size: int) -> dict[str, object] | None:
    """Return the params; None if no block is offered."""
    started = stream.started
    if started is None:
        return None
    finish = stream.choices[0].finish
    num_blocks = started.num_prompt_tokens // block_size
    if not num_blocks or finish is None or finish.reason not in _COMPLETE:
        return None
    address = address_for(peers.listen, stream.submit.core)
    host, _, port = address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": address,
        "remote_block_ids": list(range(num_blocks)),
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
    }
