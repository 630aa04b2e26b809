"""The whole device worker: plans of the real core, kernels of csrc/cuda, tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from tests.cuda.kernels.row_major import RowMajor
from tests.gpu.small import HF_CONFIG, SMALLER, run_all
from tests.models import byte_vocabulary, equality
from tests.models.conftest import engine_config, in_groups, serve
from tests.models.kv.test_swapping import with_host_memory
from tests.models.random_checkpoints import expectations, of_module, write_checkpoint
from tests.models.rows import falcon, gemma, gpt, latent, moe, states
from tests.models.rows.remote_code import QWEN_1
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_embeds import mixed
from tests.models.test_engine import GREEDY, CoreAndWorker, changed, small_kv, without_prefix_cache
from tests.models.test_qwen1_long import Qwen1WithPrompts

from quintet.executor.backends.cuda.boot import make_device_worker
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.backends.registry import make_worker
from quintet.executor.checkpoints.gguf.weights import open_gguf
from quintet.executor.checkpoints.quant.blocks import read_blocks
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.gguf import GgufQuantization
from quintet.executor.checkpoints.quant.kv_scales import read_kv_scales
from quintet.executor.checkpoints.quant.method import Quantization
from quintet.executor.checkpoints.quant.stored import StoredQuantization
from quintet.executor.checkpoints.weights.load import fill_randomly, load_checkpoint, open_files
from quintet.executor.checkpoints.weights.mapped import WeightFile
from quintet.executor.context import WorkerContext
from quintet.executor.loading import MODEL_DTYPES as DTYPES
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.model_config.share import WHOLE, Share
from quintet.executor.models.model import CausalModel, Setting, build_model
from quintet.executor.speculation.draft_model import draft_tokens
from quintet.wire.config import EngineConfig
from quintet.wire.model_files import is_gguf
from quintet.wire.params import SamplingParams, Thinking, ThinkingBound

__all__ = ["serve"]

KINDS = {
    "experts": moe.ROWS["mixtral"],
    "side by side, a part rotated": gpt.ROWS["gpt_neox"],
    "ALiBi": falcon.ROWS["bloom"],
    "soft caps": gemma.ROWS["gemma2"],
    "two rotations": gemma.ROWS["gemma3"],
    "latent": latent.ROWS["minicpm3"],
    "states, and no attention": states.ROWS["mamba"],
    "states beside attention, experts": states.ROWS["qwen3 next"],
}
"""One model of each kind of layer that `FAMILIES` lacks."""
MORE_KINDS = {
    "queries that grow, a rotation by the prompt": of_module(
        QWEN_1 | {"seq_length": 16, "max_position_embeddings": 128}, Qwen1WithPrompts
    ),
    "sinks": moe.ROWS["gpt-oss"],
    "chunks, interleaved, layers without rotation": moe.ROWS["llama4"],
    "interleaved, fused": gpt.ROWS["gptj"],
    "latent, experts of groups": latent.ROWS["deepseek v3"],
    "states of heads": states.ROWS["mamba2"],
    "states of heads and attention in one layer": states.ROWS["falcon h1"],
    "states, attention and experts": states.ROWS["jamba, experts"],
    "short convolutions": states.ROWS["lfm2"],
}
"""Variants of kinds that the fast suite covers once."""
BLOCKS_OF_16 = pytest.mark.parametrize("serve", [16], indirect=True)


def model_on(device: Device, config: EngineConfig, share: Share = WHOLE) -> CausalModel:
    """Return the configured model, or a rank's share, on the device; weights stay coded where the checkpoint has codes."""
    path, stored, dtype = (
        Path(config.model.path),
        recognise(hf_config_of(config.model)),
        DTYPES[config.model.dtype],
    )
    files: Sequence[WeightFile] = ()
    if config.executor.load_format != "dummy":
        files = open_gguf(path, config.model, dtype, read_blocks) if is_gguf(path) else open_files(path)
    contents = {name: file.entries[name] for file in files for name in file.entries}
    quantization: Quantization = RowMajor()
    if is_gguf(path):
        quantization = GgufQuantization(contents, quantization, on_device=True)
    elif stored is not None:
        quantization = StoredQuantization(stored, quantization, contents, on_device=True)
    logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
    setting = Setting(device.torch_device, dtype, quantization, share, logits_dtype)
    model = build_model(config.model.architecture, hf_config_of(config.model), setting)
    with torch.inference_mode():
        if config.executor.load_format == "dummy":
            fill_randomly(model.weights, config.executor.seed)
        else:
            load_checkpoint(model.weights, files)
    if config.cache.dtype == "fp8":
        read_kv_scales(files, model.attentions)
    return model


def draft_on(device: Device, context: WorkerContext) -> WorkerContext | None:
    """Return the context of the draft model, loaded, if there is one."""
    draft = context.of_draft(draft_tokens(context.config.scheduler))
    if draft is not None:
        draft.add(0, model_on(device, draft.config))
    return draft


def worker_on(
    device: Device, config: EngineConfig, *, captured: bool = True, **executor: Any
) -> DeviceWorker:
    """Return a worker with all its graphs captured if ``captured``, else with none."""
    settings = msgspec.structs.replace(config.executor, enforce_eager=not captured, **executor)
    config = msgspec.structs.replace(config, executor=settings)
    context = WorkerContext(config)
    worker = make_device_worker(device, model_on(device, config), context, draft_on(device, context))
    while worker.has_idle_tasks:
        worker.run_idle_task()
    return worker


@BLOCKS_OF_16
@pytest.mark.drawn(4)  # switches of one shape; `KINDS` has the others
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(family: str, serve: Callable[..., Any], device: Device) -> None:
    served = serve(FAMILIES[family](), max_model_len=96)
    prompts = prompts_of((1, 3, 8, 17, 29))
    expected = served.greedy(prompts, 12)
    config = in_groups(changed(served.config, max_num_seqs=8, max_num_batched_tokens=23))
    driver = CoreAndWorker(config, worker_on(device, config))
    for i, prompt in enumerate(prompts):
        driver.admit(i + 1, prompt, SamplingParams(temperature=0.0, max_tokens=12, seed=0))
    driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "family", [*KINDS, *(pytest.param(name, marks=pytest.mark.whole) for name in MORE_KINDS)]
)
def test_tokens_of_other_kinds_of_layers(family: str, tmp_path: Path, device: Device) -> None:
    """Layers without our kernels are computed by torch inside the captured step. Some tokens choose all experts, some fewer."""
    row = KINDS.get(family) or MORE_KINDS[family]
    expected = expectations(write_checkpoint(row, tmp_path), (1, 9, 17, 29))
    config = changed(equality.load(tmp_path).config, max_num_seqs=8, max_num_batched_tokens=23)
    driver = CoreAndWorker(config, worker_on(device, config))
    for i, each in enumerate(expected):
        driver.admit(i + 1, each.prompt, equality.GREEDY)
    driver.run()
    assert [driver.outputs[i + 1] for i in range(len(expected))] == [each.outputs for each in expected]


@pytest.mark.whole  # `test_worker_bits.py` compares the bits
@BLOCKS_OF_16
def test_tokens_do_not_depend_on_scheduling_or_graphs(serve: Callable[..., Any], device: Device) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    prompts = prompts_of()
    num_tokens = 20
    expected = served.greedy(prompts, num_tokens)
    base = with_host_memory(changed(served.config, max_num_seqs=8))
    captured, eager = worker_on(device, base), worker_on(device, base, captured=False)
    variants = {
        "eager, in chunks": (changed(base, max_num_batched_tokens=17, long_prefill_token_threshold=5), eager),
        "graphs, no prefix cache, synchronous": (
            without_prefix_cache(changed(base, max_steps_in_flight=1)),
            captured,
        ),
        "graphs, preemption": (small_kv(base), captured),
    }
    for name, (config, worker) in variants.items():
        driver = CoreAndWorker(config, worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=0))
        driver.run()
        assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected, name
        assert driver.engine.state is not None
        counters = driver.engine.state.counters
        assert (counters.preemptions > 0) == name.endswith("preemption"), (name, counters)
        assert (counters.swap_in_blocks > 0) == name.endswith("preemption"), (name, counters)


@BLOCKS_OF_16
def test_sampling_settings_equal_the_host(serve: Callable[..., Any], device: Device) -> None:
    """Seeds, filters, penalties and log-probabilities next to plain rows equal the draws of the host's kernels."""
    served = serve(FAMILIES["qwen2"](), max_model_len=96)
    settings = [
        SamplingParams(temperature=0.0, max_tokens=10, seed=0),
        SamplingParams(temperature=0.9, max_tokens=10, seed=7),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, max_tokens=10, seed=8),
        SamplingParams(temperature=0.7, min_p=0.05, max_tokens=10, seed=9),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=10, seed=0),
        SamplingParams(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=10, seed=3),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=10, seed=0),
    ]
    config = changed(served.config, max_num_seqs=8)
    drawn = []
    for worker in (served.core.worker, worker_on(device, config)):
        driver = CoreAndWorker(config, worker)
        for i, params in enumerate(settings):
            driver.admit(i + 1, prompts_of()[i], params)
        driver.run()
        drawn.append([driver.outputs[i + 1] for i in range(len(settings))])
    assert drawn[0] == drawn[1]


@BLOCKS_OF_16
def test_prompt_embeds(serve: Callable[..., Any], device: Device) -> None:
    """In chunks, next to rows that decode in graphs; the last chunk is a one-token step without a graph."""
    served = serve(FAMILIES["llama-mqa-tied"](), max_model_len=96)
    prompts = prompts_of((1, 5, 17, 29))
    expected = served.greedy(prompts, 12)
    config = changed(served.config, max_num_seqs=8, max_num_batched_tokens=7)
    driver = CoreAndWorker(config, worker_on(device, config))
    for i, prompt in enumerate(mixed(served.reference.get_input_embeddings().weight, prompts)):
        driver.admit(i + 1, prompt, SamplingParams(temperature=0.0, max_tokens=12, seed=0))
    driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected


@BLOCKS_OF_16
def test_reasoning_ends_after_its_budget(serve: Callable[..., Any], device: Device) -> None:
    """Two plans in flight, next to a plain row: as on the host, the end marks are drawn when the budget is spent."""
    served = serve(FAMILIES["qwen2"](), max_model_len=96)
    config = changed(served.config, max_num_seqs=8)
    ways, closes = [Thinking([3], [7, 8]), Thinking([5, 6], [9])], [[7], [9]]
    settings = [
        SamplingParams(temperature=0.9, seed=4, max_tokens=24, thinking_bound=ThinkingBound(*each))
        for each in (
            (5, ways, closes, 0),
            (0, ways, closes, 1),
            (11, ways, closes, 1),
            (5, ways, closes, None),
        )
    ]
    drawn = []
    for worker in (served.core.worker, worker_on(device, config)):
        driver = CoreAndWorker(config, worker)
        for i, params in enumerate([*settings, GREEDY]):
            driver.admit(i + 1, prompts_of()[i], params)
        driver.run()
        drawn.append(driver.outputs)
    assert drawn[0] == drawn[1]
    budgets = {1: ([7, 8], 5), 2: ([9], 0), 3: ([9], 11)}
    for request_id, (forced, begin) in budgets.items():
        outputs = drawn[1][request_id]
        assert outputs[begin : begin + len(forced)] == forced or {7, 9} & set(outputs[:begin])


@BLOCKS_OF_16
def test_structured_outputs(serve: Callable[..., Any], tmp_path: Path, device: Device) -> None:
    """Next to plain rows, with two plans in flight: the draws equal those of the host's kernels."""
    served = serve(FAMILIES["qwen2"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    drawn = []
    for worker in (make_worker(config), worker_on(device, config)):
        driver = CoreAndWorker(config, worker)
        for number in (0, 1, 2, 4):
            driver.admit(number + 1, prompts_of()[number], byte_vocabulary.requested(num_tokens=24)[number])
        driver.run()
        drawn.append(driver.outputs)
    assert drawn[0] == drawn[1]
    byte_vocabulary.check({request_id - 1: tokens for request_id, tokens in drawn[1].items()})


@BLOCKS_OF_16
def test_host_never_waits_while_plain_rows_decode(serve: Callable[..., Any], device: Device) -> None:
    """Two plans are in flight before the first one's tokens arrive; the second reads them on the device."""
    served = serve(FAMILIES["llama-mha"](), max_model_len=96)
    config = changed(served.config, max_num_seqs=4)
    worker = worker_on(device, config)
    driver = CoreAndWorker(config, worker)
    driver.admit(1, prompts_of()[4], GREEDY)
    plans = [driver.engine.plan(0), driver.engine.plan(0)]
    assert all(plan is not None for plan in plans)
    pendings = [worker.begin(plan) for plan in plans if plan is not None]
    tokens = b"".join(pending.result().token_ids for pending in pendings)
    expected = served.greedy(prompts_of()[4:5], 2)[0]
    assert list(torch.frombuffer(bytearray(tokens), dtype=torch.int32)) == expected
    assert all(pending.device_ms is not None for pending in pendings)
    assert pendings[1].gap_ms is not None


def check_with_little_memory(
    served: Any, device: Device, is_too_large: Callable[[int, int], bool], prompts: list[list[int]]
) -> None:
    """Compare the tokens with transformers' if steps of these rows and tokens run out of memory."""
    config = changed(served.config, max_num_seqs=8)
    worker = worker_on(device, config, captured=False)
    compute = worker.runner.compute

    def scarce(staging: torch.Tensor, num_rows: int, num_tokens: int, *sizes: int) -> Any:
        if is_too_large(num_rows, num_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(staging, num_rows, num_tokens, *sizes)

    driver = CoreAndWorker(config, worker)
    for i, prompt in enumerate(prompts):
        driver.admit(i + 1, prompt, SamplingParams(temperature=0.0, max_tokens=10, seed=0))
    with mock.patch.object(worker.runner, "compute", scarce):
        driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == served.greedy(prompts, 10)
    assert worker.num_split > 0


@BLOCKS_OF_16
def test_oom_step_is_split(serve: Callable[..., Any], device: Device) -> None:
    served = serve(FAMILIES["llama-mha"](), max_model_len=96)
    check_with_little_memory(served, device, lambda _, num_tokens: num_tokens > 20, prompts_of())


@BLOCKS_OF_16
def test_oom_split_into_many_parts_keeps_the_tokens_of_the_step_before(
    serve: Callable[..., Any], device: Device
) -> None:
    """Each part copies its tokens to a pinned buffer; the loop has not read those of the step in flight."""
    served, prompts = serve(FAMILIES["llama-mha"](), max_model_len=96), prompts_of((1, 3, 4, 5, 7, 8, 9, 16))
    check_with_little_memory(served, device, lambda *size: 1 < size[0] == size[1], prompts)


def test_fp8_cache_changes_logprobs_slightly(tmp_path: Path, device: Device) -> None:
    """e4m3 keeps three fraction bits, so keys and values are off by up to 1/16, and scores change slightly."""
    hf_config = HF_CONFIG | SMALLER | {"head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = engine_config(tmp_path, hf_config, 16, 128, "bfloat16", load_format="dummy", seed=3)
    config = changed(config, max_num_seqs=4)
    settings = SamplingParams(temperature=0.0, max_tokens=1, seed=0, logprobs=5)
    logprobs_by_dtype = {}
    for dtype in ("auto", "fp8"):
        kv = config.model.kv
        if dtype == "fp8":
            kv = msgspec.structs.replace(kv, layer_bytes=kv.layer_bytes // 2)
        chosen = msgspec.structs.replace(
            config,
            model=msgspec.structs.replace(config.model, kv=kv),
            cache=msgspec.structs.replace(config.cache, dtype=dtype),
        )
        worker = worker_on(device, chosen)
        assert worker.runner.kv.dtype == (torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16)
        logprobs_by_dtype[dtype] = run_all(chosen, worker, {1: (prompts_of((50,))[0], settings)}).logprobs[1][
            0
        ]
    values = {dtype: np.frombuffer(each.logprobs, np.float32) for dtype, each in logprobs_by_dtype.items()}
    assert logprobs_by_dtype["auto"].token_ids[:4] == logprobs_by_dtype["fp8"].token_ids[:4]
    assert values["auto"].tobytes() != values["fp8"].tobytes(), "fp8 was not used"
    # measured: 0.008; a key read from a wrong address changes them by tenths
    assert abs(values["auto"] - values["fp8"]).max() < 0.05
