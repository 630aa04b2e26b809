"""`kill -9` of ranks during expert rebalancing: all responses stay the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from bench.chaos.streams import random_requests, run_requests

from quintet.deploy.embedded import default_model_path
from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.chaos.test_ranks import RANK
from tests.processes.server import Server, serve

pytestmark = pytest.mark.whole
"""`tests.models.distributed.test_eplb` tests copies of experts without a server."""

COPIES = "quintet:executor_expert_copies_total"
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module", params=[(2, 1), (4, 1), (2, 2)], ids="{0[0]}x{0[1]}".format)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server of random experts with the embedded tokenizer; placement is revised every four steps."""
    size, stages = request.param
    folder, shipped = tmp_path_factory.mktemp("experts"), default_model_path()
    shipped_config = json.loads((shipped / "config.json").read_text())
    same = {
        name: shipped_config[name]
        for name in ("vocab_size", "eos_token_id", "bos_token_id")
        if name in shipped_config
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | same))
    eplb = {"window_size": 8, "step_interval": 4, "num_redundant_experts": 2 * size}
    ranks = ("--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(stages), "--threads", "1")
    experts = ("--enable-expert-parallel", "--enable-eplb", "--eplb-config", json.dumps(eplb))
    weights = ("--load-format", "dummy", "--tokenizer", str(shipped))
    with serve(str(folder), *weights, *little_memory("model", 8), *COMMON, *ranks, *experts) as server:
        yield server


def test_kills_during_expert_copies_keep_all_bytes(server: Server) -> None:
    """The first executor has copied experts before its kill; each new one starts from the initial placement."""
    requests = random_requests(4, 12, (60, 120))
    reference = asyncio.run(run_requests(server.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in reference.results)
    server.await_metrics()
    assert server.gauge(COPIES) > 0
    last = max(int(title.rpartition("-")[2]) for title in server.children() if RANK in title)
    rng = random.Random(7)

    async def disturb() -> None:
        for _ in range(3):
            rank = rng.randint(0, last)
            kill(server, RANK if rank else "executor", index=rank)
            await asyncio.sleep(rng.choice([0.5, 1.5]))

    assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
