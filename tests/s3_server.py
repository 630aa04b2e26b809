"""A server that speaks S3, for tests: moto's, where it is installed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Run one; yield the environment in which clients find it, and a bucket that is there. Its log goes to ``folder``."""
    pytest.importorskip("moto")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _make_bucket(url, server)
            environment = {
                "AWS_ACCESS_KEY_ID": "nobody",
                "AWS_SECRET_ACCESS_KEY": "nothing",
                "AWS_REGION": "us-east-1",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_ENDPOINT_URL": url,
                "AWS_ENDPOINT_OVERRIDE": url,
            }
            yield environment, BUCKET
        finally:
            server.kill()


def _make_bucket(url: str, server: subprocess.Popen[bytes]) -> None:
    """Make the bucket as soon as the server takes it."""
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    until_s = time.monotonic() + 60.0
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5.0):
                return
        except urllib.error.URLError:
            assert server.poll() is None and time.monotonic() < until_s, "moto's server does not begin"
            time.sleep(0.1)
