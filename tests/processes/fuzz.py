"""Fuzz a real server with schemathesis: requests that its OpenAPI document allows, and invalid ones.

python -m tests.processes.fuzz PATH/TO/schemathesis [its flags, e.g. --max-examples 100]

Failures are 5xx responses, undocumented statuses or content types, and bodies without required fields. 504 is none: it is the
answer to a request with a short `timeout`. `make fuzz` runs it in a separate environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes.server import serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
KEY = "for-the-fuzzer"
CONFIG = Path(__file__).with_name("schemathesis.toml")


def main(program: str, *flags: str) -> int:
    """Return the exit status of schemathesis. A repeated flag overrides the default."""
    with serve(
        "--kv-cache-memory",
        "64MiB",
        "--max-model-len",
        "512",
        "--api-key",
        KEY,
        "--enable-tokenizer-info-endpoint",
        "--enable-prompt-embeds",
    ) as server:
        command = [
            program, "--config-file", str(CONFIG), "run", server.url + "/openapi.json", "-H", f"x-api-key: {KEY}",
            "--checks", ",".join(CHECKS), "--request-timeout", "30", "--max-examples", "20", *flags,
        ]  # fmt: skip
        status = subprocess.run(command, check=False).returncode
        assert server.stop() == 0, "the server's exit status is not 0"
        return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
