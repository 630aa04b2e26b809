"""Row 4 of docs/gpu.md: the five processes with the executor on the device."""

from __future__ import annotations

from tests.processes.server import serve


def test_serve_answers_as_on_the_processor() -> None:
    texts = []
    for device in ("cuda", "cpu"):
        with serve(
            "--device", device, "--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-model-len", "512"
        ) as server:
            status, answer = server.post(
                "/v1/completions", {"prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}
            )
            assert status == 200, answer
            texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
