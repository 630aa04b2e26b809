"""Sockets, file modes, CORS headers and logs of a running server."""

import hmac
import os
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from quintet.frontend.http.auth import Keys
from quintet.process.sockets import KEY_FILE
from quintet.wire.errors import RequestError

from .server import Server, serve

SECRET = "zanzibar heliotrope"


def processes_of(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.children().values()]


def headers_of(server: Server, origin: str) -> dict[str, str]:
    request = urllib.request.Request(server.url + "/v1/models", headers={"Origin": origin})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {name.lower(): value for name, value in answer.headers.items()}


def test_server_is_private_by_default() -> None:
    with serve("--executor", "mock", "--log-level", "DEBUG", "--log-requests") as server:
        bound = {
            Path(str(connection.laddr))
            for process in processes_of(server)
            for connection in process.net_connections("unix")
            if str(connection.laddr).startswith("/")
        }
        folders = {path.parent for path in bound}
        assert len(bound) == 6 and len(folders) == 1, bound
        (folder,) = folders
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600

        listening = {
            connection.laddr.ip
            for process in processes_of(server)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}

        sent = headers_of(server, "https://elsewhere.example")
        assert sent["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in sent

        status, answer = server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 16, "seed": 4})
        assert status == 200
        assert server.post("/v1/completions", {"prompt": SECRET, "temperature": SECRET})[0] == 400
        assert (
            server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]})[0] == 200
        )
        key = (folder / KEY_FILE).read_bytes()
        assert server.stop() == 0
    log = "\n".join(server.lines)
    assert "/v1/completions" in log, "--log-requests logs a line per request"
    for word in (*SECRET.split(), answer["choices"][0]["text"].strip()):
        assert word not in log
    assert key.hex() not in log
    assert not folder.exists()


@pytest.mark.parametrize("presented", ["sk-a", "sk-b", "unrelated", "", "sk-aa"])
def test_api_keys_are_compared_in_constant_time(presented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is compared with all valid keys, so that the duration does not reveal a valid one."""
    compared: list[tuple[Any, Any]] = []
    digest = hmac.compare_digest

    def compare(given: Any, key: Any) -> bool:
        compared.append((given, key))
        return digest(given, key)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    request = SimpleNamespace(
        path="/v1/models", header=lambda name: presented if name == "x-api-key" else None
    )
    keys = Keys(["sk-a", "sk-b"])
    if presented in ("sk-a", "sk-b"):
        keys.check(cast(Any, request))
    else:
        with pytest.raises(RequestError):
            keys.check(cast(Any, request))
    assert compared == [(presented.encode(), b"sk-a"), (presented.encode(), b"sk-b")]


def test_unix_socket_replaces_the_port(tmp_path: Path) -> None:
    path = tmp_path / "quintet.sock"
    stale_socket = socket.socket(socket.AF_UNIX)
    stale_socket.bind(str(path))  # a killed server leaves its socket file
    stale_socket.close()
    with serve("--executor", "mock", "--uds", str(path)) as server:
        assert server.url == f"unix:{path}"
        command = next(line.strip() for line in server.lines if line.strip().startswith("curl "))
        answer = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
        )
        assert answer.stdout.rstrip().endswith("data: [DONE]")
        assert not [
            connection
            for process in processes_of(server)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        second = subprocess.run(
            [sys.executable, "-m", "quintet.deploy.cli.main", "serve", "--executor", "mock", "--uds", str(path)],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert second.returncode == 1 and "is in use by another program" in second.stderr
        assert server.stop() == 0
    assert not path.exists()
