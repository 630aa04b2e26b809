"""`kill -9` of ranks that copy experts to each other all the time: no client sees another byte."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from bench.chaos.streams import crowd, play

from quintet.deploy.embedded import default_model_path
from tests.chaos.test_kills import COMMON, assert_same, kill, little_memory
from tests.chaos.test_ranks import RANK
from tests.processes.server import Server, serve

pytestmark = pytest.mark.whole
"""That copying changes no bit is seen in `tests.models.distributed.test_eplb` as well, without a server."""

COPIES = "quintet:executor_expert_copies_total"
CARD = {
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
    """Random experts that say something with the tokens of the model that ships; placement is looked at every four steps."""
    size, stages = request.param
    folder, shipped = tmp_path_factory.mktemp("experts"), default_model_path()
    its = json.loads((shipped / "config.json").read_text())
    same = {name: its[name] for name in ("vocab_size", "eos_token_id", "bos_token_id") if name in its}
    (folder / "config.json").write_text(json.dumps(CARD | same))
    eplb = {"window_size": 8, "step_interval": 4, "num_redundant_experts": 2 * size}
    ranks = ("--tensor-parallel-size", str(size), "--pipeline-parallel-size", str(stages), "--threads", "1")
    experts = ("--enable-expert-parallel", "--enable-eplb", "--eplb-config", json.dumps(eplb))
    weights = ("--load-format", "dummy", "--tokenizer", str(shipped))
    with serve(str(folder), *weights, *little_memory("model", 8), *COMMON, *ranks, *experts) as server:
        yield server


def test_ranks_that_die_while_experts_are_copied_change_no_byte(server: Server) -> None:
    """Of the first executor to die it is known that it had copied some, and each new one begins where experts are at home."""
    asked = crowd(4, 12, (60, 120))
    calm = asyncio.run(play(server.url, asked))
    assert all(heard.status == 200 and heard.is_done and not heard.error for heard in calm.heard)
    server.await_metrics()
    assert server.gauge(COPIES) > 0
    last = max(int(title.rpartition("-")[2]) for title in server.children() if RANK in title)
    rng = random.Random(7)

    async def disturb() -> None:
        for _ in range(3):
            rank = rng.randint(0, last)
            kill(server, RANK if rank else "executor", index=rank)
            await asyncio.sleep(rng.choice([0.5, 1.5]))

    assert_same(server, calm, asyncio.run(play(server.url, asked, disturb)), asked)
