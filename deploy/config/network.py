"""Validation of network flags: TLS certificates, list values, CORS."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quintet.deploy.config import rules
from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError


def listed(words: Sequence[str], flag: str) -> list[str]:
    """Return the values of a repeated flag; a value may be a JSON list, as in vLLM. Raises `ConfigError`."""
    names: list[str] = []
    for word in words:
        if not word.startswith("["):
            names.append(word)
            continue
        try:
            names += msgspec.json.decode(word, type=list[str])
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise ConfigError(f"{flag} is {word!r}; give a name, or a JSON list of strings.") from None
    return names


def check(options: Options) -> str | None:
    """Validate the flags; return a warning about unprotected access, or None. Raises `ConfigError`."""
    _check_certificates(options)
    if len(options.uds.encode()) > rules.MAX_SOCKET_PATH:
        raise ConfigError(
            f"--uds has {len(options.uds.encode())} bytes; a socket path can have at most {rules.MAX_SOCKET_PATH}. Choose a "
            "shorter one."
        )
    origins = listed(options.allowed_origins, "--allowed-origins")
    warnings = [] if options.uds else [rules.advise_open_server(options.host, bool(options.api_key))]
    if options.allow_credentials and "*" in origins:
        warnings.append(
            "--allow-credentials with --allowed-origins *: any web page can send requests with the visitor's cookies; list the "
            "allowed origins"
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
                raise ConfigError(f"{flag} requires --ssl-certfile; HTTPS needs the server's certificate.")
        return
    for flag, given in files.items():
        if given and not Path(given).is_file():
            raise ConfigError(f"{flag} is {given!r}, which is not a file.")
    try:
        tls_context(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"--ssl-certfile {options.ssl_certfile!r} and its key cannot be loaded: {error}. Give PEM files of a "
            "certificate and its key, without a password."
        ) from None


def tls_context(certfile: str, keyfile: str, ca_certs: str) -> ssl.SSLContext:
    """Return the server's TLS context. Raises `ssl.SSLError` or `OSError` for invalid files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile or None, password=lambda: b"")
    if ca_certs:
        context.load_verify_locations(ca_certs)
    return context
