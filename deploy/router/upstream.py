"""Conversion of client requests to upstream requests, and filtering of answer headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from quintet.deploy.http_client.connection import Target
from quintet.frontend.http.auth import KEY_HEADERS
from quintet.frontend.http.http_request import Header

HOP_BY_HOP = frozenset(
    b"connection proxy-connection keep-alive te trailer transfer-encoding upgrade proxy-authenticate proxy-authorization".split()
)
"""Hop-by-hop headers (RFC 9110, section 7.6.1), besides those named by a Connection header."""
NOT_SENT = HOP_BY_HOP | frozenset(
    b"host content-length content-encoding expect accept-encoding x-request-id x-quintet-relay".split()
)
"""Request headers that are not forwarded. The router decompresses bodies, so content-encoding is among them."""

NOT_FORWARDED = HOP_BY_HOP | frozenset(
    b"content-type content-length x-request-id request-id x-quintet-relay".split()
)
"""Answer headers that are not forwarded, or that the router sets itself."""
CORS_PREFIX = b"access-control-"
"""Prefix of CORS headers, which the router sets itself."""

RELAY = b"x-quintet-relay"
TICKET = re.compile(rb"(-?[0-9]{1,19}(?:,-?[0-9]{1,19})*)\.([0-9]{1,19})(?:\.([0-9a-z_]{1,64}))?")
"""Value of the relay header: seed of each prompt, start of the answer in seconds since 1970, and an optional name."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request for any server."""

    method: str
    path: str
    query: str
    headers: Sequence[Header]
    """Headers of the client."""
    request_id: str
    body: bytes
    key: str = ""
    """API key for the servers, which replaces the client's key."""
    extra: Sequence[Header] = ()

    def bytes_for(self, target: Target) -> bytes:
        """Serialize the request as HTTP/1.1."""
        where = f"{target.prefix}{self.path}" + (f"?{self.query}" if self.query else "")
        lines = [
            f"{self.method} {where} HTTP/1.1\r\nhost: {target.authority}\r\nx-request-id: {self.request_id}".encode(
                "latin-1"
            )
        ]
        left_out = NOT_SENT | _named(self.headers)
        if self.key:
            left_out |= {b"authorization", *(name.encode() for name in KEY_HEADERS)}
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in left_out]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}".encode("latin-1"))
        lines += [b"%b: %b" % header for header in self.extra]
        if self.body or self.method in ("POST", "PUT"):
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join([*lines, b"", self.body])


def forwarded_headers(headers: Sequence[Header]) -> list[Header]:
    """Return the forwarded headers of an answer, without content type and length."""
    left_out = NOT_FORWARDED | _named(headers)
    return [
        header for header in headers if header[0] not in left_out and not header[0].startswith(CORS_PREFIX)
    ]


def _named(headers: Iterable[Header]) -> set[bytes]:
    """Return the hop-by-hop headers named by Connection headers."""
    return {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")
    }


def header_of(headers: Iterable[Header], name: bytes) -> bytes:
    """Return the first header of this name; empty if missing."""
    return next((value for key, value in headers if key == name), b"")


def retry_after_s(headers: Iterable[Header]) -> int:
    """Return the Retry-After header in seconds; 0 if missing or invalid."""
    value = header_of(headers, b"retry-after").strip()
    return int(value[:6]) if value.isdigit() else 0


def resume_request(
    outgoing: Outgoing, ticket: bytes, position: str, outputs: list[list[int]]
) -> Outgoing | None:
    """Build the request that resumes a stream on another server; None if the first server sent no valid ticket."""
    match = TICKET.fullmatch(ticket)
    if match is None:
        return None
    body = msgspec.json.encode(
        {
            "path": outgoing.path,
            "request": msgspec.Raw(outgoing.body),
            "position": position,
            "outputs": outputs,
            "seeds": [int(seed) for seed in match[1].split(b",")],
            "created": int(match[2]),
            "name": (match[3] or b"").decode(),
        }
    )
    return replace(outgoing, path="/v1/streams", query="", body=body)


def rest_request(outgoing: Outgoing, name: str, position: str) -> Outgoing:
    """Build the request that resumes a stream on the same server."""
    headers = [header for header in outgoing.headers if header[0] != b"content-type"]
    path, query = f"/v1/streams/{name}", f"from={position}"
    return replace(outgoing, method="GET", path=path, query=query, headers=headers, body=b"")
