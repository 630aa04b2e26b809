"""KV cache administration: GET /kv, POST /kv/pin, /kv/unpin, /kv/evict, /kv/export and /kv/import.

For operators only (`quintet.frontend.http.auth`). Prompts are private: a prefix is listed as hash and counts, and as
text only on request.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Handler, Service
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.errors import RequestError, invalid
from quintet.wire.kv_admin import MAX_LISTED, MAX_NAME, KvPrefix, KvReport, KvUsage, Verb
from quintet.wire.kv_tiers import EXCHANGE
from quintet.wire.kv_validate import is_file_name
from quintet.wire.messages import TextPrompt
from quintet.wire.params import check_token_ids

DEFAULT_LIMIT = 100


class PrefixBody(msgspec.Struct, forbid_unknown_fields=True):
    """Prefix to act on: one of ``id``, ``prompt`` and ``token_ids``."""

    id: str | None = None
    """Id from the listing, or at least its first eight digits."""
    prompt: str | None = None
    """Text, tokenized as a completion's prompt; only its whole blocks count."""
    token_ids: list[int] | None = None
    cache_salt: str = ""
    """Cache salt of the requests with this prefix; for ``prompt`` or ``token_ids``."""


class ExportBody(PrefixBody):
    """Prefix to export, and the file name."""

    file: str = ""


class ImportBody(msgspec.Struct, forbid_unknown_fields=True):
    """Name of a file that `/kv/export` wrote, on this or another server."""

    file: str


_decoder = msgspec.json.Decoder(PrefixBody)
_export_decoder = msgspec.json.Decoder(ExportBody)
_import_decoder = msgspec.json.Decoder(ImportBody)


async def listing(service: Service, http_request: HttpRequest) -> None:
    """List every engine's prefixes, most recently used first."""
    limit, with_text = _limit(http_request), http_request.has_flag("text")
    reports = await _ask(service, "list", limit=limit, with_tokens=with_text)
    found = [(report.core, prefix, report.usage) for report in reports for prefix in report.prefixes]
    found.sort(key=lambda each: math.inf if each[1].idle_ns is None else each[1].idle_ns)
    shown = []
    for core, prefix, usage in found[:limit]:
        shown.append(row := _prefix(core, prefix, usage))
        if with_text:
            ids = list(unpack_i32(prefix.token_ids))
            row["text"] = await service.queries.detokenize(ids) if ids else None
            row["token_ids"] = ids or None
    await http_request.respond_json(
        {
            "object": "list",
            "data": shown,
            "has_more": sum(report.num_prefixes for report in reports) > len(shown),
            "engines": [
                _usage_of_engine(report, report.usage) for report in reports if report.usage is not None
            ],
            "errors": _errors(reports),
        }
    )


def change(verb: Verb) -> Handler:
    """Return the handler that pins, unpins or evicts a prefix on every engine."""

    async def handle(service: Service, http_request: HttpRequest) -> None:
        body = parse.decode(await http_request.read_json_body(service.bodies), _decoder)
        name, token_ids = await _prefix_of(service, body)
        reports = await _ask(service, verb, name=name, token_ids=token_ids, salt=body.cache_salt)
        await http_request.respond_json(
            {"object": f"kv.{verb}", "data": _prefixes(reports), "errors": _errors(reports)}
        )

    return handle


async def export_prefix(service: Service, http_request: HttpRequest) -> None:
    """Write a prefix's disk blocks into a file in the export folder."""
    body = parse.decode(await http_request.read_json_body(service.bodies), _export_decoder)
    path = _path_of(service, body.file)
    name, token_ids = await _prefix_of(service, body)
    fields = {"name": name, "token_ids": token_ids, "salt": body.cache_salt, "file": body.file}
    reports = await _ask(service, "export", **fields)
    data, num_bytes = _prefixes(reports), reports[0].num_bytes
    await http_request.respond_json(
        {"object": "kv.export", "data": data, "file": path, "bytes": num_bytes, "errors": []}
    )


async def import_prefix(service: Service, http_request: HttpRequest) -> None:
    """Load a file's blocks to the disk of every engine."""
    body = parse.decode(await http_request.read_json_body(service.bodies), _import_decoder)
    path = _path_of(service, body.file)
    reports = await _ask(service, "import", file=body.file)
    data = [
        {
            "engine": report.core,
            "imported": report.num_imported,
            "known": report.num_known,
            "damaged": report.num_damaged,
        }
        for report in reports
        if report.error is None
    ]
    await http_request.respond_json(
        {"object": "kv.import", "data": data, "file": path, "errors": _errors(reports)}
    )


def _path_of(service: Service, file: str) -> str:
    """Return the path of an export file. Raises `RequestError` for an invalid name, or without --kv-disk."""
    if not is_file_name(file):
        raise invalid(
            "file must be a name of up to 100 letters, digits, dots, dashes and underscores, without a folder.",
            "file",
        )
    disk = service.config.cache.disk
    if disk is None:
        raise invalid(
            "Export and import of prefixes require --kv-disk; start the server with it.",
            "file",
        )
    return f"{disk.folder}/{EXCHANGE}/{file}"


async def _prefix_of(service: Service, body: PrefixBody) -> tuple[str, bytes]:
    """Return the prefix's id, or its token ids. Raises `RequestError`."""
    given = [name for name in ("id", "prompt", "token_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid(f"{len(given)} of id, prompt and token_ids were sent; send exactly one.", "id")
    if body.id is not None:
        name = body.id.lower()
        if len(name) > MAX_NAME or name.strip("0123456789abcdef"):
            raise invalid("id must be a hexadecimal prefix id; GET /kv lists them.", "id")
        return name, b""
    if body.token_ids is not None:
        check_token_ids(body.token_ids, service.config.model.vocab_size, "token_ids")
        ids = pack_i32(body.token_ids)
    else:
        ids = (await service.queries.tokenize(TextPrompt(body.prompt or "", True))).token_ids
    longest = service.config.model.max_model_len
    if not 0 < len(ids) // 4 <= longest:
        raise invalid(f"The prefix has {len(ids) // 4} tokens; send 1 to {longest}.", given[0])
    return "", ids


def _limit(http_request: HttpRequest) -> int:
    given = http_request.query_param("limit")
    if given is None:
        return DEFAULT_LIMIT
    if not (given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MAX_LISTED):
        raise invalid(f"limit must be a number from 1 to {MAX_LISTED}.", "limit")
    return int(given)


async def _ask(service: Service, verb: Verb, **fields: Any) -> list[KvReport]:
    """Return the reports of the engines. Raises `RequestError` if all failed."""
    reports = await service.queries.kv_query(verb, **fields)
    errors = [report.error for report in reports if report.error is not None]
    if len(errors) == len(reports):
        raise RequestError(errors[0].code, errors[0].message, errors[0].param)
    return reports


def _errors(reports: list[KvReport]) -> list[dict[str, object]]:
    """Return the errors of engines that failed while others succeeded."""
    return [
        {"engine": report.core, "message": report.error.message}
        for report in reports
        if report.error is not None
    ]


def _prefixes(reports: list[KvReport]) -> list[dict[str, object]]:
    return [_prefix(report.core, prefix, report.usage) for report in reports for prefix in report.prefixes]


def _prefix(core: int, prefix: KvPrefix, usage: KvUsage | None) -> dict[str, object]:
    blocks = {"memory": prefix.device, "host": prefix.host, "disk": prefix.disk}
    return {
        "id": prefix.digest.hex(),
        "object": "kv.prefix",
        "engine": core,
        "tokens": prefix.num_tokens,
        "blocks": blocks,
        "bytes": sum(blocks.values()) * (0 if usage is None else usage.block_bytes),
        "pinned": prefix.is_pinned,
        "last_used_s": None if prefix.idle_ns is None else round(prefix.idle_ns * 1e-9, 1),
    }


def _usage_of_engine(report: KvReport, usage: KvUsage) -> dict[str, object]:
    return {
        "engine": report.core,
        "block_tokens": usage.block_size,
        "block_bytes": usage.block_bytes,
        "blocks": usage.num_blocks,
        "blocks_cached": usage.num_known,
        "blocks_pinned": usage.num_pinned,
        "blocks_pinned_at_most": usage.most_pinned,
        "disk_blocks": usage.num_places,
        "disk_blocks_held": usage.num_on_disk,
        "prefixes": report.num_prefixes,
    }
