"""Servers that share a bucket of S3, by fsspec and by NIXL: what one computed the other fetches, and both go on when it is gone.

The bucket is moto's, whose server speaks S3.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.processes.server import serve, wait_until
from tests.processes.test_kv_store import FLAGS, RUN, ask, runs

from quintet.executor.store.connector import open_connector
from quintet.wire.config import KvStoreConfig

BUCKET = "bucket"
CONTENT = bytes(range(256)) * 12_000
NAMES = [f"{'ab' * 16}/{number:064x}" for number in range(8)]


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


def check_objects(url: str) -> None:
    """What a connector promises, of the real thing."""
    config = KvStoreConfig(url=url, waiting_bytes=1, staging_bytes=1)
    one, other = open_connector(config), open_connector(config)
    for name in NAMES[:5]:
        assert one.put(name, memoryview(CONTENT))
    assert other.count(NAMES) == 5
    into = bytearray(len(CONTENT))
    assert other.get(NAMES[4], memoryview(into)) and into == CONTENT
    assert not other.get(NAMES[5], memoryview(into))
    other.drop(NAMES[0])
    assert not other.get(NAMES[0], memoryview(into))
    assert other.put(NAMES[0], memoryview(CONTENT)) and other.get(NAMES[0], memoryview(into))
    one.close()
    other.close()


def check_servers(url: str, storage: subprocess.Popen[bytes]) -> None:
    """Two servers, and then no storage."""
    flags = (*FLAGS, "--kv-store", url)
    with serve(*flags) as one, serve(*flags) as other:
        text, num_cached = ask(one)
        assert num_cached == 0
        wait_until(lambda: runs(one, "kept") > 0, "the prompt in the store")
        assert ask(other) == (text, RUN)
        storage.kill()
        begun_s = time.monotonic()
        prompt = "Nobody has computed this. " * 40
        assert ask(one, prompt)[0] == ask(other, prompt)[0]
        print(f"{url}: without the storage after {time.monotonic() - begun_s:.1f} s")


def main() -> None:
    """Check one after the other."""
    for scheme in ("s3", "nixl+s3"):
        with s3_server() as storage:
            check_objects(f"{scheme}://{BUCKET}/objects")
            check_servers(f"{scheme}://{BUCKET}/servers", storage)


if __name__ == "__main__":
    main()
