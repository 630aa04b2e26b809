"""Row ``processes`` of docs/gpu.md: the five processes end to end with the executor on the device."""

from __future__ import annotations

import pytest
from tests.processes.server import Server, serve, wait_until

COMMON = ("--kv-cache-memory", "64MiB", "--max-model-len", "512", "--no-standby")
PROMPTS = ("def fibonacci(n):", "import ", "class Stack:\n    def push(self, item):")


def completions(server: Server) -> list[str]:
    """Return the greedy continuations of the prompts."""
    texts = []
    for prompt in PROMPTS:
        status, answer = server.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 48, "temperature": 0}
        )
        assert status == 200, answer
        texts.append(answer["choices"][0]["text"])
    return texts


def test_fp32_answers_are_those_of_the_cpu(device_name: str) -> None:
    texts = []
    for device in (device_name, "cpu"):
        with serve("--device", device, "--dtype", "float32", *COMMON) as server:
            texts.append(completions(server))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "flags", [(), ("--batch-invariant",), ("--enforce-eager",)], ids=["default", "invariant", "eager"]
)
def test_bf16_answers_repeat_and_blocks_are_freed(device_name: str, flags: tuple[str, ...]) -> None:
    with serve("--device", device_name, "--dtype", "bfloat16", *flags, *COMMON) as server:
        first = completions(server)
        assert all(first)
        assert completions(server) == first
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "live_requests")
        wait_until(
            lambda: all(server.gauge(f"quintet:{name}") == 0 for name in names), "no live requests or blocks"
        )
        assert server.stop() == 0
