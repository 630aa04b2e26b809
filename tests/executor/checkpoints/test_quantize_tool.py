"""Folders written by `quintet quantize`: the `compressed-tensors` package and Quintet read the same numbers; GPTQ and AWQ."""

from __future__ import annotations

import importlib
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.equality import alone, load, max_difference
from tests.models.random_checkpoints import Logits, Row, batched_logits, of_transformers
from tests.models.test_equal import made

from quintet.deploy.cli.main import main
from quintet.executor.checkpoints.quantize_tool import compressed
from quintet.executor.checkpoints.quantize_tool.awq import Division
from quintet.executor.checkpoints.quantize_tool.compressed import plan_of, write_compressed
from quintet.executor.checkpoints.quantize_tool.layers import layers_of
from quintet.executor.checkpoints.quantize_tool.rounding import gptq, rounded
from quintet.executor.checkpoints.quantize_tool.targets import TARGETS
from quintet.executor.checkpoints.weights.load import open_files
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError

CLOSE = 3e-3
"""Maximum error of logits, in standard deviations: activations are integers of 16 bits."""
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES = {
    "llama": of_transformers("LlamaConfig", **_WIDE),
    "falcon, one tensor of queries, keys and values": of_transformers(
        "FalconConfig", num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=256, **_WIDE
    ),
    "experts": of_transformers(
        "OlmoeConfig",
        num_experts=4,
        num_experts_per_tok=4,
        num_key_value_heads=4,
        pad_token_id=0,
        **(_WIDE | {"intermediate_size": 128}),
    ),
}


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder in fp32, as the package decompresses them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of its imports
        quantization = importlib.import_module("compressed_tensors.quantization")
        packed = importlib.import_module("compressed_tensors.compressors.pack_quantized")
        naive = importlib.import_module("compressed_tensors.compressors.naive_quantized")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(section)
    (scheme,) = config.config_groups.values()
    compressor: Any = {
        "pack-quantized": packed.PackedQuantizationCompressor,
        "int-quantized": naive.IntQuantizationCompressor,
    }[config.format]
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith(".weight_scale"):
            stem = name.removesuffix("_scale").removesuffix(".weight")
            its = {each.rpartition(".")[2]: each for each in tensors if each.rpartition(".")[0] == stem}
            stored = {ending: tensors[each] for ending, each in its.items() if ending != "bias"}
            stored["weight_scale"] = stored[
                "weight_scale"
            ].float()  # the package multiplies in the scales' dtype
            found[f"{stem}.weight"] = compressor.decompress(stored, scheme)["weight"].float()
    rest = {name: tensor for name, tensor in tensors.items() if ".weight_" not in name and name not in found}
    return {**rest, **found}


def quantized_row(row: Row, name: str, target: Path) -> Row:
    """Return the row with the numbers of its quantized folder, which making the row writes to ``target``."""

    def make(folder: Path) -> Logits:
        row.make(folder)
        hf_config = json.loads((folder / "config.json").read_text())
        write(folder, target, name)
        tensors = decompressed(target)
        before = load_file(folder / "model.safetensors")
        assert tensors.keys() == before.keys()
        assert (
            sum(not torch.equal(tensors[each], before[each]) for each in before)
            >= 4 * hf_config["num_hidden_layers"]
        )
        save_file(
            {each: tensor.contiguous() for each, tensor in tensors.items()}, folder / "model.safetensors"
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        return batched_logits(model.float().eval())

    return Row(make)


def write(folder: Path, target: Path, name: str) -> None:
    hf_config = json.loads((folder / "config.json").read_text())
    plan = plan_of(folder, hf_config["architectures"][0], HfConfig(hf_config, str(folder)), TARGETS[name])
    counted: list[int] = []
    write_compressed(plan, target, counted.append)
    assert sum(counted) == plan.num_numbers
    weights = target / "model.safetensors"
    assert 0 < weights.stat().st_size - plan.num_bytes < 1 << 16


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_the_quantized_numbers(family: str, name: str, tmp_path: Path) -> None:
    out = tmp_path / "quantized"
    expected = made(quantized_row(FAMILIES[family], name, out), tmp_path / "plain")
    (out / "tokenizer.json").write_text("{}")
    loaded = load(out, "float32")
    assert loaded.config.executor.quantization == "compressed-tensors"
    outcome = alone(loaded, [each.prompt for each in expected])
    if name == "w8a8":  # also rounds activations
        for i, each in enumerate(expected):
            first = torch.frombuffer(bytearray(outcome.bits[i, len(each.prompt)]), dtype=torch.float32)
            assert torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1] > 0.99
        return
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]


def correlated(count: int, depth: int) -> torch.Tensor:
    """Return correlated inputs, like those of a model; the last column is zero."""
    draw = torch.Generator().manual_seed(1)
    few = torch.randn(count, depth // 8, generator=draw) @ torch.randn(depth // 8, depth, generator=draw)
    inputs = few + 0.3 * torch.randn(count, depth, generator=draw)
    inputs[:, -1] = 0
    return inputs


def test_gptq_reduces_the_output_error() -> None:
    target, inputs = TARGETS["gptq"], correlated(2000, 256)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(2))
    by_nearest = rounded(weight, target, torch.bfloat16).numbers
    by_gptq = gptq(weight, inputs.t() @ inputs, target, torch.bfloat16).numbers
    lost = [float((inputs @ (each - weight).t()).square().sum()) for each in (by_nearest, by_gptq)]
    assert lost[1] < 0.5 * lost[0]
    assert (by_gptq - weight).square().sum() > (
        by_nearest - weight
    ).square().sum()  # the weights' own error is larger


def test_gptq_of_uncorrelated_inputs_rounds_to_nearest() -> None:
    target = TARGETS["gptq"]
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(3))
    found = gptq(weight, torch.eye(256) * 7, target, torch.bfloat16)
    assert torch.equal(found.codes, rounded(weight, target, torch.bfloat16).codes)


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 256)
    weight[1, :128] = torch.linspace(-1, 1, 128)
    for name in ("int4", "int8"):
        found = rounded(weight, TARGETS[name], torch.bfloat16)
        assert (
            torch.isfinite(found.numbers).all()
            and not found.numbers[0].any()
            and not found.numbers[1, 128:].any()
        )
        assert (found.scales > 0).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the embedded model with two layers."""
    from quintet.deploy.embedded import default_model_path

    source, folder = Path(default_model_path()), tmp_path / "model"
    folder.mkdir()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    hf_config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": 2}))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensors[name] for name in tensors if ".layers.2." not in name and ".layers.3." not in name}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_rounding_uses_the_usable_cores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all cores of the machine: affinity and quota may allow fewer."""
    num_threads: set[int] = set()

    def pool(max_workers: int, **options: Any) -> ThreadPoolExecutor:
        num_threads.add(max_workers)
        return ThreadPoolExecutor(max_workers, **options)

    monkeypatch.setattr(compressed, "usable_cores", lambda: 3)
    monkeypatch.setattr(compressed, "ThreadPoolExecutor", pool)
    write(folder, tmp_path / "out", "int4")
    assert num_threads == {3}


def test_calibration_reduces_the_error_of_logits(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text()[:9000])
    words = ["quantize", str(folder)]
    assert main([*words, str(tmp_path / "nearest"), "--format", "int4"]) == 0
    assert main([*words, str(tmp_path / "gptq"), "--format", "gptq", "--calibration", str(text)]) == 0
    prompts = [[0, *range(40 + 7 * i, 90 + 7 * i)] for i in range(6)]
    plain = logits_of(load_file(folder / "model.safetensors"), folder, prompts)
    off = {
        name: (logits_of(decompressed(tmp_path / name), folder, prompts) - plain).square().mean()
        for name in ("nearest", "gptq")
    }
    assert off["gptq"] < 0.9 * off["nearest"]


def unpacked(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of AutoAWQ's folder in fp32, decoded by its format: words of eight interleaved rows."""
    tensors = load_file(folder / "model.safetensors")
    rows = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])

    def codes_of(words: torch.Tensor) -> Any:
        bits = words.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        return bits[..., rows].reshape(len(words), -1).astype(np.float32)

    found = {}
    for name in [each for each in tensors if each.endswith(".qweight")]:
        stem = name.removesuffix(".qweight")
        codes, zeros = (codes_of(tensors.pop(f"{stem}.{each}")) for each in ("qweight", "qzeros"))
        scales = tensors.pop(f"{stem}.scales").float().numpy()
        groups = np.arange(len(codes)) // 128
        found[f"{stem}.weight"] = torch.from_numpy(((codes - zeros[groups]) * scales[groups]).T.copy())
    return {name: tensor.float() for name, tensor in tensors.items()} | found


def test_awq_reduces_the_error_and_writes_its_format(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(json.__file__).read_text()[:9000])
    words = ["quantize", str(folder)]
    assert main([*words, str(tmp_path / "nearest"), "--format", "int4"]) == 0
    assert main([*words, str(tmp_path / "awq"), "--format", "awq", "--calibration", str(text)]) == 0
    prompts = [[0, *range(40 + 7 * i, 90 + 7 * i)] for i in range(6)]
    plain = logits_of(load_file(folder / "model.safetensors"), folder, prompts)
    tensors = unpacked(tmp_path / "awq")
    meant = logits_of(tensors, folder, prompts)
    nearest = logits_of(decompressed(tmp_path / "nearest"), folder, prompts)
    assert (meant - plain).square().mean() < 0.9 * (nearest - plain).square().mean()
    loaded = load(tmp_path / "awq", "float32")
    assert loaded.config.executor.quantization == "awq"
    outcome = alone(loaded, prompts)
    for i, prompt in enumerate(prompts):
        first = torch.frombuffer(bytearray(outcome.bits[i, len(prompt)]), dtype=torch.float32)
        assert (first - meant[i, -1]).abs().max() < CLOSE * meant[i, -1].std()
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(tensors[norm], load_file(folder / "model.safetensors")[norm].float())


@torch.inference_mode()
def logits_of(tensors: dict[str, torch.Tensor], folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.float().eval().load_state_dict(tensors, strict=False)
    model.tie_weights()
    return torch.as_tensor(model(torch.tensor(prompts)).logits)


SAME_INPUTS = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
"""Layers with the same inputs, by the first of them."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "more", "in_each_layer"),
    [
        ("Qwen2Config", {}, 3),
        ("Gemma2Config", {}, 3),  # stores norm weights minus one
        (
            "Phi3Config",
            {"pad_token_id": 0},
            3,
        ),  # fuses gates and ups, and queries, keys and values
        ("StableLmConfig", {}, 3),  # has biases in its norms
        ("CohereConfig", {}, 1),  # shares one norm between attention and feed-forward
        ("Olmo2Config", {}, 1),  # has layers without a norm before them
        (
            "OPTConfig",
            {"ffn_dim": 96, "word_embed_proj_dim": 64},
            2,
        ),  # has an activation before the down projection
    ],
)
def test_folding_scales_keeps_the_logits(
    name: str, more: dict[str, int], in_each_layer: int, tmp_path: Path
) -> None:
    of_transformers(name, num_hidden_layers=2, hidden_size=64, **more).make(tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    makers = layers_of(
        hf_config["architectures"][0], HfConfig(hf_config, str(tmp_path)), open_files(tmp_path)
    ).makers
    assert len(makers) == 2 * in_each_layer
    tensors = {each: tensor.float() for each, tensor in load_file(tmp_path / "model.safetensors").items()}
    prompts = [list(range(5, 40))]
    before = logits_of(tensors, tmp_path, prompts)
    draw = torch.Generator().manual_seed(7)
    for first, maker in makers.items():
        factors = 0.5 + torch.rand(tensors[first].shape[1], generator=draw)
        stem, _, last = first.removesuffix(".weight").rpartition(".")
        for reader in SAME_INPUTS.get(last, (last,)):
            tensors[f"{stem}.{reader}.weight"] = tensors[f"{stem}.{reader}.weight"] * factors
        made = tensors[f"{maker.name}.weight"]
        if made.dim() == 2:
            factors = torch.cat([torch.ones(maker.first_row), factors])
            tensors[f"{maker.name}.weight"] = made / factors[:, None]
        else:
            tensors[f"{maker.name}.weight"] = Division(factors, maker.offset).of(made)
        if f"{maker.name}.bias" in tensors:
            tensors[f"{maker.name}.bias"] = Division(factors).of(tensors[f"{maker.name}.bias"])
    after = logits_of(tensors, tmp_path, prompts)
    assert (after - before).abs().max() < 1e-4 * before.std()


def test_unsupported_models_and_flags_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(row: Row, name: str, words: str) -> None:
        folder = tmp_path / words[:4]
        row.make(folder)
        with pytest.raises(ConfigError, match=words):
            write(folder, tmp_path / "out", name)

    refused(of_transformers("GPT2Config"), "int8", "is transposed")
    refused(of_transformers("LlamaConfig"), "int4", "not a multiple of 128: use --format int8")
    of_transformers("OlmoeConfig", **_WIDE, num_experts=4, num_experts_per_tok=2, pad_token_id=0).make(
        tmp_path / "experts"
    )
    (tmp_path / "text").write_text("some words")
    words = ["quantize", str(tmp_path / "experts"), str(tmp_path / "out")]
    for more, error in (
        (["--format", "gptq"], "--format gptq requires --calibration FILE"),
        (["--format", "int8", "--calibration", str(tmp_path / "text")], "--calibration is for gptq and awq"),
        (["--format", "gptq", "--calibration", str(tmp_path / "text")], "has experts"),
        (["--format", "awq"], "--format awq requires --calibration FILE"),
    ):
        assert main([*words, *more]) == EXIT_CONFIG
        assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
