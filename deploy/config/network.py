"""What is wrong with the network's flags before anybody listens: files of certificates, lists, who may call from a browser."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quintet.deploy.config import rules
from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError

MAX_SOCKET_PATH = 107
"""Bytes that Linux gives the name of a Unix socket."""


def listed(words: Sequence[str], flag: str) -> list[str]:
    """Return a repeated flag's words; one may be a JSON list of them, as vLLM's users write it. Raises `ConfigError`."""
    names: list[str] = []
    for word in words:
        if not word.startswith("["):
            names.append(word)
            continue
        try:
            names += msgspec.json.decode(word, type=list[str])
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise ConfigError(f"{flag} is {word!r}; give a word, or a JSON list of strings.") from None
    return names


def check(options: Options) -> str | None:
    """Reject what could not be served, with advice; return a warning about access that is wide open. Raises `ConfigError`."""
    _check_certificates(options)
    if len(options.uds.encode()) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"--uds has {len(options.uds.encode())} bytes; the path of a socket may have {MAX_SOCKET_PATH}. Choose a "
            "shorter one."
        )
    origins = listed(options.allowed_origins, "--allowed-origins")
    warnings = [] if options.uds else [rules.advise_open_server(options.host, bool(options.api_key))]
    if options.allow_credentials and "*" in origins:
        warnings.append(
            "--allow-credentials with --allowed-origins *: any page can act for its visitor where a proxy asks for cookies; "
            "name the origins"
        )
    return "; ".join(filter(None, warnings)) or None


def _check_certificates(options: Options) -> None:
    files = {
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
    }
    if not options.ssl_certfile:
        for flag, given in files.items():
            if given:
                raise ConfigError(
                    f"{flag} is given without --ssl-certfile; https needs the server's certificate."
                )
        return
    for flag, given in files.items():
        if given and not Path(given).is_file():
            raise ConfigError(f"{flag} is {given!r}, which is no file.")
    try:
        tls_context(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile!r} and its key cannot be used: {error}. Give PEM files of one "
            "certificate and its own key, which must not need a password."
        ) from None


def tls_context(certfile: str, keyfile: str, ca_certs: str) -> ssl.SSLContext:
    """Return what the server's side of TLS needs; raises what `ssl` raises for files that do not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile or None, password=lambda: b"")
    if ca_certs:
        context.load_verify_locations(ca_certs)
    return context
