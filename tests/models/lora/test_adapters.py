"""LoRA adapters: tokens of transformers with merged weights, and the same bits in every schedule."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import equality
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import Dtype, Loaded, few_blocks, load, with_blocks
from tests.models.kv.test_swapping import with_host_memory
from tests.models.lora.random_adapters import RandomAdapter, write_adapter
from tests.models.pooling.test_vectors import CLOSE, LAST, PARAMS
from tests.models.random_checkpoints import Row, expectations, write_checkpoint
from tests.models.rows import dense, gemma, gpt, latent, llama, moe, states
from tests.models.small_models import prompts_of
from tests.models.test_engine import CoreAndWorker, changed, small_kv
from tests.models.test_oom_split import limit_tokens
from tests.models.test_same_bits import LogitRecorder

from quintet.executor.backends.registry import make_worker
from quintet.executor.lora.adapters import LoraLayer
from quintet.wire.config import EngineConfig
from quintet.wire.request import adapter_digest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
GPT2 = ("c_attn", "c_proj", "c_fc")
ROWS: dict[str, tuple[Row, Sequence[RandomAdapter]]] = {
    "llama": (
        llama.ROWS["llama"],
        [
            RandomAdapter(ALL),
            RandomAdapter(("q_proj", "v_proj"), 8, seed=8, hf_config={"use_rslora": True}),
            RandomAdapter(("up_proj",), 2, seed=9, layers=(1,)),
        ],
    ),
    "gpt2": (gpt.ROWS["gpt2"], [RandomAdapter(GPT2), RandomAdapter(("c_attn",), 3, seed=8)]),
    "gpt neox": (gpt.ROWS["gpt_neox"], [RandomAdapter(("query_key_value", "dense_h_to_4h"))]),
    "phi3": (dense.ROWS["phi3"], [RandomAdapter(("qkv_proj", "gate_up_proj", "down_proj"))]),
    "gemma 3": (gemma.ROWS["gemma3"], [RandomAdapter(ALL)]),
    "deepseek v3": (
        latent.ROWS["deepseek v3"],
        [RandomAdapter(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))],
    ),
    "mixtral": (moe.ROWS["mixtral"], [RandomAdapter(ATTENTION)]),
    "mamba2": (states.ROWS["mamba2"], [RandomAdapter(("in_proj", "out_proj"))]),
    "nemotron h": (states.ROWS["nemotron h"], [RandomAdapter(("in_proj", "out_proj", "q_proj", "o_proj"))]),
    "qwen3 next": (states.ROWS["qwen3 next"], [RandomAdapter(("q_proj", "o_proj", "out_proj"))]),
}

Outputs = dict[tuple[str, int], list[int]]
Bits = dict[tuple[str, int, int], bytes]


def written(name: str, folder: Path) -> tuple[Path, list[Any], dict[str, Any]]:
    """Write a row's model and adapters. Returns the model, the logits of the model and of each adapter, and flags."""
    row, adapters = ROWS[name]
    model = folder / "model"
    logits = [write_checkpoint(row, model)]
    logits += [write_adapter(each, model, folder / str(i)) for i, each in enumerate(adapters, 1)]
    return model, logits, {"lora_modules": [f"{i}={folder / str(i)}" for i in range(1, len(logits))]}


def run(
    config: EngineConfig, worker: Any, prompts: Mapping[tuple[str, int], list[int]], rounds: int = 1
) -> tuple[Outputs, Bits, CoreAndWorker]:
    """Send each prompt to the adapter of its key; "" is the model. Returns tokens and logits of the last round."""
    witness = LogitRecorder(worker)
    driver = CoreAndWorker(config, witness)  # type: ignore[arg-type]
    for round_ in range(rounds):
        for number, ((name, _), prompt) in enumerate(prompts.items()):
            adapter = adapter_digest(config.model, name)
            driver.admit(1000 * round_ + number, prompt, equality.GREEDY, adapter=adapter)
        driver.run()
    first, keys = 1000 * (rounds - 1), list(prompts)
    outputs = {key: driver.outputs[first + number] for number, key in enumerate(keys)}
    bits = {(*keys[k - first], at): value for (k, at), value in witness.release().items() if k >= first}
    return outputs, bits, driver


def alone(loaded: Loaded, prompts: Mapping[tuple[str, int], list[int]]) -> tuple[Outputs, Bits]:
    """Compute each prompt alone."""
    outputs, bits = Outputs(), Bits()
    for key, prompt in prompts.items():
        found = run(changed(loaded.config), loaded.worker, {key: prompt})
        outputs, bits = outputs | found[0], bits | found[1]
    return outputs, bits


def check_schedules(
    loaded: Loaded,
    prompts: Mapping[tuple[str, int], list[int]],
    schedules: Mapping[str, Mapping[str, int]] = equality.MORE_SCHEDULES,
) -> tuple[Outputs, Bits]:
    """Check that no schedule changes a bit, and that each happened; return the results of requests alone."""
    expected = alone(loaded, prompts)
    for schedule, settings in schedules.items():
        config = changed(loaded.config, **settings)
        if "preemption" in schedule:
            config = with_blocks(config, few_blocks(config))
        hits = "prefix hits" in schedule
        outputs, bits, driver = run(config, loaded.worker, prompts, 2 if hits else 1)
        assert (outputs, bits) == expected, schedule
        assert not hits or max(driver.cached.values()) > 0, schedule
    return expected


def prompts_for(config: EngineConfig) -> dict[tuple[str, int], list[int]]:
    """Return the same prompts for the model and each adapter, so that their KV blocks would be shared by mistake."""
    names = ["", *(each.name for each in config.model.adapters)]
    return {(name, i): prompt for i, prompt in enumerate(prompts_of((1, 17, 40))) for name in names}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ROWS)
def test_tokens_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    model, logits, flags = written(name, tmp_path)
    expected = {
        ("" if not number else str(number), i): each
        for number, source in enumerate(logits)
        for i, each in enumerate(expectations(source, (1, 16, 31), seed=number))
    }
    loaded = load(model, **flags)
    outputs, _ = check_schedules(
        loaded, {key: each.prompt for key, each in expected.items()}, equality.SCHEDULES
    )
    assert outputs == {key: each.outputs for key, each in expected.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2"])
def test_bits_are_equal_in_every_schedule(name: str, dtype: Dtype, tmp_path: Path) -> None:
    model, _, flags = written(name, tmp_path)
    loaded = load(model, dtype, **flags)
    prompts = prompts_for(loaded.config)
    outputs, _ = check_schedules(loaded, prompts)
    for i in range(3):
        assert len({tuple(outputs[name, each]) for name, each in prompts if each == i}) > 1, (
            "adapters change nothing"
        )


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_requests_without_an_adapter_have_the_bits_of_a_server_without_adapters(
    quantization: Any, tmp_path: Path
) -> None:
    model, _, flags = written("llama", tmp_path)
    plain, loaded = load(model, "bfloat16", quantization), load(model, "bfloat16", quantization, **flags)
    prompts = prompts_for(loaded.config)
    _, expected = alone(plain, {key: prompt for key, prompt in prompts.items() if not key[0]})
    _, bits, _ = run(changed(loaded.config), loaded.worker, prompts)
    assert {key: value for key, value in bits.items() if not key[0]} == expected


def test_drafts_change_no_bit(tmp_path: Path) -> None:
    model, _, flags = written("llama", tmp_path)
    plain = load(model, **flags)
    prompts = prompts_for(plain.config)
    expected, _ = alone(plain, prompts)
    for method in ("ngram", "suffix"):
        speculative = f'{{"method": "{method}", "num_speculative_tokens": 3}}'
        loaded = load(model, **flags, speculative_config=speculative)
        for settings in equality.SCHEDULES.values():
            driver = CoreAndWorker(changed(loaded.config, **settings), loaded.worker)
            for number, ((name, _), prompt) in enumerate(prompts.items()):
                driver.admit(
                    number, prompt, equality.GREEDY, adapter=adapter_digest(plain.config.model, name)
                )
            driver.run()
            assert [driver.outputs[number] for number in range(len(prompts))] == [*expected.values()]


def test_swapping_and_split_steps_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, flags = written("llama", tmp_path)
    loaded = load(model, **flags)
    prompts = {(name, i): prompt for (name, i), prompt in prompts_for(loaded.config).items() if i}
    expected = alone(loaded, prompts)
    swapping = with_host_memory(small_kv(changed(loaded.config, max_num_batched_tokens=13)))
    outputs, bits, driver = run(swapping, make_worker(swapping), prompts)
    assert (outputs, bits) == expected
    assert driver.engine.state is not None and driver.engine.state.counters.preemptions > 0
    limit_tokens(loaded.worker, 7, monkeypatch)
    outputs, bits, _ = run(changed(loaded.config), loaded.worker, prompts)
    assert (outputs, bits) == expected and loaded.worker.num_split > 0


def test_packing_frees_the_unpacked_matrices() -> None:
    a, b = torch.ones(2, 4, 64), torch.ones(2, 64, 4)
    references = [weakref.ref(each) for each in (a, b)]
    layer = LoraLayer(a, b)
    del a, b
    first, second = layer.handles
    assert (len(first), len(second)) == (1, 2) and [each() for each in references] == [None, None]


def test_packed_matrices_are_adjacent() -> None:
    """Small weights with huge pages of their own would take 2 MiB each."""
    layer = LoraLayer(torch.ones(3, 4, 64), torch.ones(3, 64, 4))
    starts = [each.memory.untyped_storage().data_ptr() for each in layer.packed[1]]
    assert len(set(starts)) == 1 and layer.packed[1][0].memory.untyped_storage().nbytes() < 8192


def test_torch_gives_the_tokens_too(tmp_path: Path) -> None:
    model, logits, flags = written("llama", tmp_path)
    expected = {
        (str(number), 0): expectations(source, (17,))[0] for number, source in enumerate(logits) if number
    }
    loaded = load(model, compiled=False, **flags)
    with torch.inference_mode():
        outputs, _, _ = run(
            changed(loaded.config), loaded.worker, {k: each.prompt for k, each in expected.items()}
        )
    assert outputs == {key: each.outputs for key, each in expected.items()}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "dtype", "size", "stages", "context"),
    [
        ("llama", "bfloat16", 2, 1, 1),
        ("llama", "bfloat16", 4, 1, 2),
        ("llama", "float32", 1, 3, 1),
        ("llama", "bfloat16", 2, 2, 1),
        ("gpt2", "bfloat16", 2, 1, 1),
        ("deepseek v3", "float32", 2, 2, 1),
        ("mamba2", "bfloat16", 2, 1, 1),
        ("mixtral", "bfloat16", 2, 1, 1),
    ],
)
def test_ranks_and_stages_have_the_bits_of_one_process(
    name: str, dtype: Dtype, size: int, stages: int, context: int, tmp_path: Path
) -> None:
    model, _, flags = written(name, tmp_path)
    loaded = load(model, dtype, layout_invariant=True, **flags)
    prompts = prompts_for(loaded.config)
    expected, _ = alone(loaded, prompts)
    layout = {"stages": stages, "context": context, "experts": name in ("mixtral", "deepseek v3")}
    with in_ranks(model, size, dtype, invariant=True, **layout, **flags) as loaded:
        for schedule, settings in equality.SCHEDULES.items():
            config = changed(loaded.config, **settings)
            driver = CoreAndWorker(
                with_blocks(config, few_blocks(config)) if "preemption" in schedule else config, loaded.worker
            )
            for number, ((adapter, _), prompt) in enumerate(prompts.items()):
                driver.admit(number, prompt, equality.GREEDY, adapter=adapter_digest(config.model, adapter))
            driver.run()
            assert [driver.outputs[number] for number in range(len(prompts))] == [*expected.values()], (
                schedule
            )


def test_pooled_vectors_of_an_adapter(tmp_path: Path) -> None:
    """Those of a checkpoint with merged weights, up to fp32 sums in another order; equal bits alone and together."""
    row, _ = ROWS["llama"]
    write_checkpoint(row, tmp_path / "model")
    write_adapter(RandomAdapter(ALL), tmp_path / "model", tmp_path / "a", tmp_path / "merged")
    loaded = load(tmp_path / "model", runner="pooling", lora_modules=[f"a={tmp_path / 'a'}"])
    prompts = prompts_of((5, 17, 40))

    def vectors(served: Loaded, names: Sequence[str], asked: Sequence[list[int]]) -> list[bytes]:
        driver = CoreAndWorker(changed(served.config), served.worker)
        requests = [(name, prompt) for prompt in asked for name in names]
        for number, (name, prompt) in enumerate(requests):
            digest = adapter_digest(served.config.model, name)
            driver.admit(number, prompt, PARAMS[LAST], pooling=LAST, adapter=digest)
        driver.run()
        return [driver.vectors[number] for number in range(len(requests))]

    together = vectors(loaded, ("", "a"), prompts)[1::2]
    assert together == [vectors(loaded, ("a",), [prompt])[0] for prompt in prompts]
    expected = vectors(load(tmp_path / "merged", runner="pooling"), ("",), prompts)
    for found, wanted in zip(together, expected, strict=True):
        ours, theirs = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found, wanted))
        assert float((ours - theirs).norm() / theirs.norm()) < CLOSE
