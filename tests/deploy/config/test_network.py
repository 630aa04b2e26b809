"""Network flags are validated before any socket listens."""

from __future__ import annotations

import pytest

from quintet.deploy.config import network
from quintet.deploy.config.flag_table import make_options
from quintet.deploy.config.sections import frontend_config
from quintet.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ssl_keyfile": "k.pem"}, "requires --ssl-certfile"),
        ({"ssl_certfile": "/nowhere/c.pem"}, "which is not a file"),
        ({"ssl_certfile": __file__}, "cannot be loaded"),
        ({"uds": "/tmp/" + "x" * 108}, "at most 107"),
        ({"allowed_origins": ["[1]"]}, "a JSON list of strings"),
    ],
)
def test_invalid_network_flags_are_rejected(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        network.check(make_options(flags, "the command line"))


def test_lists_are_arguments_or_json() -> None:
    assert network.listed(["a", '["b", "c"]'], "--allowed-origins") == ["a", "b", "c"]


def test_all_cors_origins_are_allowed_by_default() -> None:
    assert frontend_config(make_options({}, "the command line")).allowed_origins == ["*"]
    assert frontend_config(make_options({"allowed_origins": "[]"}, "the command line")).allowed_origins == []


def test_credentials_for_all_origins_log_a_warning() -> None:
    warning = network.check(make_options({"allow_credentials": True}, "the command line"))
    assert warning is not None and "list the allowed origins" in warning
    options = make_options({"allow_credentials": True, "allowed_origins": ["https://a"]}, "the command line")
    assert network.check(options) is None
