"""Have schemathesis ask a real server all that its OpenAPI document allows, and much that it does not.

python -m tests.processes.fuzz PATH/TO/schemathesis [its flags, e.g. --max-examples 100]

It must not find an answer of 5xx, a status or a content type that is not documented, or a body without its fields. `make fuzz`
runs it with an environment of its own.
"""

from __future__ import annotations

import subprocess
import sys

from tests.processes.server import serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
KEY = "for-the-fuzzer"


def main(program: str, *flags: str) -> int:
    """Return the exit status of schemathesis; its flags may repeat and then win."""
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
            program, "run", server.url + "/openapi.json", "-H", f"x-api-key: {KEY}", "--checks", ",".join(CHECKS),
            "--request-timeout", "30", "--max-examples", "20", *flags,
        ]  # fmt: skip
        status = subprocess.run(command, check=False).returncode
        assert server.stop() == 0, "the server did not end well"
        return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
