"""Servers with a shared S3 bucket, by fsspec and by NIXL: fetches, and operation after its loss.

moto's server provides the bucket.
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
    """Run an S3 server with a bucket; set its address in the environment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "unused",
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
            wait_until(lambda: create_bucket(f"{url}/{BUCKET}"), "a bucket")
            yield server
        finally:
            server.kill()


def create_bucket(url: str) -> bool:
    """Create a bucket; return True on success."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5.0):
            return True
    except urllib.error.URLError:
        return False


def main() -> None:
    """Run all checks."""
    for scheme in ("s3", "nixl+s3"):
        with s3_server() as storage:
            check_objects(f"{scheme}://{BUCKET}/objects")
            check_servers(f"{scheme}://{BUCKET}/servers", storage.kill)


if __name__ == "__main__":
    main()
