"""What is sent to a server for a client's request, and what of its answer goes back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from quintet.deploy.tools.load_client.connection import Target
from quintet.frontend.http.http_request import Header

HOP_BY_HOP = frozenset(
    b"connection proxy-connection keep-alive te trailer transfer-encoding upgrade proxy-authenticate proxy-authorization".split()
)
"""Headers that are between two neighbours (RFC 9110, section 7.6.1), besides those that a Connection header names."""
OURS = HOP_BY_HOP | frozenset(
    b"host content-length content-encoding expect accept-encoding x-request-id x-quintet-relay".split()
)
"""Headers of a request that are between a client and the router, which also decompresses bodies."""

NOT_THEIRS = HOP_BY_HOP | frozenset(
    b"content-type content-length x-request-id request-id x-quintet-relay".split()
)
"""Headers of an answer that are between the router and a server, or that its client gets otherwise."""
FOR_PAGES = b"access-control-"
"""How headers begin that say which pages may read an answer: the router says that of its own answers."""

RELAY = b"x-quintet-relay"
TICKET = re.compile(rb"(-?[0-9]{1,19}(?:,-?[0-9]{1,19})*)\.([0-9]{1,19})(?:\.([0-9a-z_]{1,64}))?")
"""What a server says in that header: the seed of each prompt, when the answer began, in seconds since 1970, and its name, where
the request does not say that."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request on its way to whichever server."""

    method: str
    path: str
    query: str
    headers: Sequence[Header]
    """The client's."""
    request_id: str
    body: bytes
    key: str = ""
    """The servers' own, in the place of the client's."""
    extra: Sequence[Header] = ()

    def bytes_for(self, target: Target) -> bytes:
        """Return it as HTTP."""
        host = f"[{target.host}]" if ":" in target.host else target.host
        where = f"{target.prefix}{self.path}" + (f"?{self.query}" if self.query else "")
        lines = [
            f"{self.method} {where} HTTP/1.1\r\nhost: {host}:{target.port}\r\nx-request-id: {self.request_id}".encode(
                "latin-1"
            )
        ]
        left_out = OURS | _named(self.headers)
        if self.key:
            left_out |= {b"authorization", b"x-api-key"}
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in left_out]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}".encode("latin-1"))
        lines += [b"%b: %b" % header for header in self.extra]
        if self.body or self.method in ("POST", "PUT"):
            lines.append(b"content-length: %d" % len(self.body))
        return b"\r\n".join([*lines, b"", self.body])


def passed_on(headers: Sequence[Header]) -> list[Header]:
    """Return what of an answer's headers its client gets, besides type and length of the content."""
    left_out = NOT_THEIRS | _named(headers)
    return [header for header in headers if header[0] not in left_out and not header[0].startswith(FOR_PAGES)]


def _named(headers: Iterable[Header]) -> set[bytes]:
    """Return the headers that the Connection header declares to be between two neighbours."""
    return {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")
    }


def header_of(headers: Iterable[Header], name: bytes) -> bytes:
    """Return the first header of this name; empty where there is none."""
    return next((value for key, value in headers if key == name), b"")


def retry_after_s(headers: Iterable[Header]) -> int:
    """Return when a server wants to be asked again, in seconds; 0 where it says nothing that can be read."""
    given = header_of(headers, b"retry-after").strip()
    return int(given[:6]) if given.isdigit() else 0


def going_on(outgoing: Outgoing, ticket: bytes, position: str, outputs: list[list[int]]) -> Outgoing | None:
    """Return the request that has another server go on with a stream; None where the first one did not say how."""
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


def the_rest(outgoing: Outgoing, name: str, position: str) -> Outgoing:
    """Return the request that has the same server go on with a stream."""
    headers = [header for header in outgoing.headers if header[0] != b"content-type"]
    path, query = f"/v1/streams/{name}", f"from={position}"
    return replace(outgoing, method="GET", path=path, query=query, headers=headers, body=b"")
