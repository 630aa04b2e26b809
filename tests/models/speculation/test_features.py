"""Drafts with other features of requests: outputs and log-probabilities are those without drafts, bit for bit.

KV blocks from disk and from a prefill server; prompt embeddings. Blocks from host memory: `test_random_traces`.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import transformers
from tests.models.equality import load
from tests.models.kv.test_kv_disk import with_disk
from tests.models.kv.test_kv_peer import with_peers
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import prompts_of
from tests.models.speculation.test_bits import Recorder, drafting_worker
from tests.models.speculation.test_heads_of_ranks import made
from tests.models.test_embeds import with_spans
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS

from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.request import KvTransfer

PROMPTS = prompts_of((7, 20, 35, 50))
NUM_CACHED = {1: 0, 2: 16, 3: 32, 4: 48}
"""Prompt tokens in full blocks, by request. After restored blocks, a head drafts nothing: they have no keys of it."""
SPANS: list[list[tuple[int, int]]] = [[], [(0, 20)], [(9, 30)], [(0, 50)]]
"""Positions of each prompt that are sent as embeddings."""
PARAMS = SamplingParams(
    temperature=1.0, max_tokens=30, seed=3, logprobs=3, logit_bias={7: 30.0, 9: 30.0, 11: 30.0}
)
"""Three tokens, so that each method often proposes the next one."""
OF_TOKENS: dict[str, dict[str, int]] = {"ngram": {"prompt_lookup_min": 1}, "suffix": {}, "draft_model": {}}
"""Methods that need no hidden states, with keys of their own."""


@pytest.fixture(params=[*OF_TOKENS, "eagle", "eagle3", "medusa", "mimo"])
def configs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[EngineConfig, EngineConfig]:
    """Configurations of one model without and with drafts."""
    if request.param in OF_TOKENS:
        write_checkpoint(ROWS["llama"], tmp_path)
        keys = {"method": request.param, "num_speculative_tokens": 4} | OF_TOKENS[request.param]
        flag = json.dumps(keys | ({"model": str(tmp_path)} if request.param == "draft_model" else {}))
    else:
        flag, _ = made(request.param, tmp_path)
    return changed(load(tmp_path).config), changed(load(tmp_path, speculative_config=flag).config)


def admit_all(driver: Recorder, kv_transfer: KvTransfer | None = None) -> None:
    for request_id, prompt in enumerate(PROMPTS, 1):
        driver.admit(request_id, prompt, PARAMS, kv_transfer=kv_transfer)
    driver.run()


def without_drafts(config: EngineConfig) -> Recorder:
    driver = Recorder(config, load(Path(config.model.path)).worker)
    admit_all(driver)
    return driver


def assert_same(driver: Recorder, plain: Recorder) -> None:
    assert driver.outputs == plain.outputs and driver.endings == plain.endings
    assert driver.logprobs == plain.logprobs
    assert driver.engine.state is not None
    assert driver.engine.state.counters.num_draft_tokens > 10


@pytest.mark.drawn(3)
def test_blocks_from_disk(configs: tuple[EngineConfig, EngineConfig], tmp_path: Path) -> None:
    plain = without_drafts(configs[0])
    (tmp_path / "disk").mkdir()
    config = with_disk(configs[1], tmp_path / "disk")
    for num_cached in (dict.fromkeys(NUM_CACHED, 0), NUM_CACHED):
        worker = drafting_worker(config)
        driver = Recorder(config, worker)
        admit_all(driver)
        assert worker.kv is not None
        worker.kv.close()
        assert driver.cached == num_cached
        assert_same(driver, plain)


@pytest.mark.drawn(3)
def test_blocks_from_a_prefill_server(configs: tuple[EngineConfig, EngineConfig], tmp_path: Path) -> None:
    plain = without_drafts(configs[0])
    with ExitStack() as closed:
        drivers, addresses = list[Recorder](), list[str]()
        for config in (with_peers(configs[1], tmp_path), with_peers(configs[1], tmp_path)):
            worker = drafting_worker(config)
            assert worker.kv is not None and config.cache.peers is not None
            closed.callback(worker.kv.close)
            drivers.append(Recorder(config, worker))
            addresses.append(config.cache.peers.listen)
        prefill, decode = drivers
        admit_all(prefill, KvTransfer(offers=True))
        prefill.run_disk_operations()
        admit_all(decode, KvTransfer(peer=addresses[0], num_blocks=1 << 20))
        assert decode.cached == NUM_CACHED
    assert_same(prefill, plain)
    assert_same(decode, plain)


@pytest.mark.drawn(3)
def test_prompt_embeddings(configs: tuple[EngineConfig, EngineConfig], tmp_path: Path) -> None:
    """Of whole prompts, and of the middle of one."""
    plain = without_drafts(configs[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    table = model.get_input_embeddings().weight
    driver = Recorder(configs[1], drafting_worker(configs[1]))
    for request_id, (prompt, spans) in enumerate(zip(PROMPTS, SPANS, strict=True), 1):
        driver.admit(request_id, with_spans(table, prompt, spans), PARAMS)
    driver.run()
    assert_same(driver, plain)
