"""GET /docs: interactive API documentation (RapiDoc). All its files are served here, without a key."""

from __future__ import annotations

from importlib.resources import files

from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import shown

SCRIPT = "rapidoc-min.js"
POLICY = (
    b"default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CACHE_CONTROL = b"public, max-age=3600"


def check_public(service: Service) -> None:
    """Raise `RequestError` if the documentation is not served."""
    if not service.config.frontend.docs:
        raise RequestError(ErrorCode.NOT_FOUND, "The documentation is disabled: see --disable-fastapi-docs.")


def _file(name: str) -> bytes:
    return files("quintet.frontend").joinpath("rapidoc", name).read_bytes()


async def docs(service: Service, http_request: HttpRequest) -> None:
    check_public(service)
    headers = [(b"content-security-policy", POLICY)]
    await http_request.respond(200, _file("index.html"), b"text/html; charset=utf-8", headers)


async def docs_part(service: Service, http_request: HttpRequest) -> None:
    check_public(service)
    name = http_request.path_params["name"]
    if name != SCRIPT:
        raise RequestError(ErrorCode.NOT_FOUND, f"/docs has no file {shown(name)}; open /docs.")
    await http_request.respond(
        200, _file(name), b"text/javascript; charset=utf-8", [(b"cache-control", CACHE_CONTROL)]
    )
