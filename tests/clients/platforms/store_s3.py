"""Servers that share a bucket of S3, by fsspec and by NIXL: what one computed the other fetches, and both go on when it is gone.

The bucket is moto's, whose server speaks S3.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.clients.kv_stores import check_objects, check_servers
from tests.processes.server import wait_until

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[subprocess.Popen[bytes]]:
    """Run one, with a bucket; the environment says where it is."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": url,
        "AWS_ENDPOINT_OVERRIDE": url,
    }
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with open("moto.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_until(lambda: is_made(f"{url}/{BUCKET}"), "a bucket")
            yield server
        finally:
            server.kill()


def is_made(url: str) -> bool:
    """Try to make a bucket."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5.0):
            return True
    except urllib.error.URLError:
        return False


def main() -> None:
    """Check one after the other."""
    for scheme in ("s3", "nixl+s3"):
        with s3_server() as storage:
            check_objects(f"{scheme}://{BUCKET}/objects")
            check_servers(f"{scheme}://{BUCKET}/servers", storage.kill)


if __name__ == "__main__":
    main()
