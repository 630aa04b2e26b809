"""Quantized checkpoints of other tools: the tokens of the dequantized model, in every schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from bench.quantization import layers
from bench.quantization import more_layers as tools
from bench.quantization.layers import Written
from safetensors.torch import load_file, save_file
from tests.models.checkpoints.quantized import SETTINGS, write
from tests.models.equality import SCHEDULES, Loaded, alone, load, logits_of, one_torch_thread, run_schedules

from quintet.deploy.cli.main import main
from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.formats.registry import FORMATS as FORMATS_BY_METHOD
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import StoredLayer
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

PROMPTS = [[5, 17, 3, 99, 42, 7], [201, 9], list(range(3, 60, 2))]

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
BY_ROW = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}

FORMATS: dict[str, Written] = {
    "gptq": layers.gptq(4, 64, symmetric=True),
    "awq": layers.awq(64),
    "compressed-tensors": layers.compressed(W4, "pack-quantized"),
    "fp8": layers.fp8(block=True),
    "fp8, of transformers": layers.fp8_of_transformers(),
    "bitsandbytes": layers.bitsandbytes("nf4", nested=True),
    "hqq": tools.hqq(4, 64),
}
MORE_FORMATS: dict[str, Written] = {
    "gptq, 2 bits": layers.gptq(2, 32, symmetric=False),
    "gptq, 3 bits": layers.gptq(3, 32, symmetric=True),
    "gptq, 8 bits": layers.gptq(8, 0, symmetric=True),
    "gptq, 8 bits, zeros": layers.gptq(8, 32, symmetric=False),
    "gptq, one group": layers.gptq(4, 0, symmetric=False),
    "gptq, ordered": layers.gptq(4, 32, symmetric=True, by_activations=True),
    "gptq, second version": layers.gptq(4, 128, symmetric=False, version=2),
    "awq, gemv": layers.awq(64, "gemv"),
    "awq, gemv, groups of 32": layers.awq(32, "gemv"),
    "compressed-tensors, zeros": layers.compressed(W4 | {"symmetric": False}, "pack-quantized"),
    "compressed-tensors, a row": layers.compressed(BY_ROW, "pack-quantized"),
    "compressed-tensors, 3 bits": layers.compressed(W4 | {"num_bits": 3}, "pack-quantized"),
    "compressed-tensors, 5 bits": layers.compressed(W4 | {"num_bits": 5}, "pack-quantized"),
    "compressed-tensors, bytes": layers.compressed(BY_ROW, "int-quantized"),
    "compressed-tensors, bytes, zeros": layers.compressed(BY_ROW | {"symmetric": False}, "int-quantized"),
    "compressed-tensors, fp8": layers.compressed(
        FLOATS | {"strategy": "channel"},
        "float-quantized",
        tensors=layers.eight_bit_floats("weight_scale", (1, 0)),
    ),
    "compressed-tensors, fp8 blocks": layers.compressed(
        FLOATS | {"strategy": "block", "block_structure": [128, 128]},
        "float-quantized",
        tensors=layers.eight_bit_floats("weight_scale", (128, 128)),
    ),
    "compressed-tensors, nvfp4": layers.compressed(
        FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        tensors=layers.four_bit_floats(16, global_scale="weight_global_scale"),
    ),
    "compressed-tensors, mxfp4": layers.compressed(
        FLOATS | {"num_bits": 4, "strategy": "group", "group_size": 32},
        "mxfp4-pack-quantized",
        tensors=layers.four_bit_floats(32),
    ),
    "fp8, one scale": layers.fp8(block=False),
    "fp8, one scale, null blocks": replace(
        layers.fp8(block=False), section={"quant_method": "fp8", "weight_block_size": None}
    ),
    "fp8 blocks, scales of another name": Written(
        layers.fp8(block=True).section, layers.eight_bit_floats("weight_scale", (128, 128))
    ),
    "fp8, of fbgemm": layers.fp8(block=False, method="fbgemm_fp8"),
    "bitsandbytes, nf4": layers.bitsandbytes("nf4"),
    "bitsandbytes, fp4": layers.bitsandbytes("fp4"),
    "bitsandbytes, int8": layers.bitsandbytes("int8"),
    "hqq, 3 bits": tools.hqq(3, 32),
    "hqq, 8 bits, one group": tools.hqq(8, 0),
    "hqq, 2 bits along axis 0": tools.hqq(2, 64, axis=0),
    "bitnet": tools.bitnet(),
    "auto-round": tools.autoround("auto_round"),
    "auto-round, fp8": tools.autoround_floats("fp", 8, layers.eight_bit_floats("weight_scale", (1, 0))),
    "auto-round, nvfp4": tools.autoround_floats(
        "nv_fp", 4, layers.four_bit_floats(16, global_scale="weight_global_scale")
    ),
    "squeezellm": tools.squeezellm(4),
    "squeezellm, tables alone": tools.squeezellm(3, outliers=False),
    "torchao": tools.torchao("Int8WeightOnlyConfig"),
    "torchao, 4 bits": tools.torchao("Int4WeightOnlyConfig", 32, symmetric=False),
    "torchao, fp8": tools.torchao("Float8WeightOnlyConfig"),
    "quark": Written(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            "exclude": ["lm_head"],
        },
        layers.eight_bit_floats("weight_scale", (0, 0), as_list=False),
    ),
    "quark, uint4": tools.quark_integers("uint4", 64, symmetric=False),
    "quark, fp4": Written(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
            "exclude": ["re:.*head"],
        },
        layers.four_bit_floats(32, "weight"),
    ),
    "modelopt": Written(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        layers.eight_bit_floats("weight_scale", (0, 0), as_list=False),
    ),
    "modelopt, int4, factors": tools.modelopt_integers("W4A16_AWQ", 64, factors=True),
    "modelopt, mixed": Written(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.layers.{i}.{name}": {"quant_algo": "FP8"}
                for i in range(2)
                for name in (
                    *(f"self_attn.{each}_proj" for each in "qkvo"),
                    *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
                )
            },
        },
        layers.eight_bit_floats("weight_scale", (0, 0), as_list=False),
    ),
    "modelopt, nvfp4": Written(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": ["lm_head*"],
        },
        layers.four_bit_floats(16, "weight", "weight_scale_2", divides=False),
    ),
}


SOME_SCHEDULES = {name: SCHEDULES[name] for name in ("together", "chunks, prefix hits")}


def compare(folder: Path, written: Written, config: transformers.PretrainedConfig | None = None) -> Loaded:
    """Check that both checkpoints give the same tokens, and the quantized one the same bits in every schedule."""
    ours, plain = write(folder, written, config)
    loaded = load(ours)
    assert loaded.config.executor.quantization == written.section["quant_method"]
    with one_torch_thread():
        its, expected = alone(loaded, PROMPTS), alone(load(plain), PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            actual, exact = (logits_of(each, i, len(prompt))[0] for each in (its, expected))
            apart = float((actual - exact).abs().max() / exact.std())
            # Weights are equal; activations of integer weights have 16 bits in each group of inputs: half a step of
            # 1 / 32639 of its largest number, through two layers.
            assert apart < 1e-3, (i, apart)
        for schedule, outcome in run_schedules(loaded, PROMPTS, watched=True, schedules=SOME_SCHEDULES):
            assert outcome.outputs == its.outputs, schedule
            assert outcome.bits.items() <= its.bits.items(), schedule
    return loaded


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoint_equals_its_dequantized_model(name: str, tmp_path: Path) -> None:
    compare(tmp_path, FORMATS[name])


@pytest.mark.whole
@pytest.mark.parametrize("name", MORE_FORMATS)
def test_variant_equals_its_dequantized_model(name: str, tmp_path: Path) -> None:
    compare(tmp_path, MORE_FORMATS[name])


EXPERTS = transformers.Qwen3MoeConfig(
    **SETTINGS,  # type: ignore[arg-type]
    moe_intermediate_size=64,
    num_experts=6,
    num_experts_per_tok=2,
    tie_word_embeddings=True,
)


LATENT = transformers.DeepseekV3Config(
    **SETTINGS | {"num_key_value_heads": 4, "first_k_dense_replace": 2},  # type: ignore[arg-type]
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
FUSED = transformers.Phi3Config(**SETTINGS)  # type: ignore[arg-type]
BIASED = transformers.Qwen2Config(**SETTINGS, tie_word_embeddings=True)  # type: ignore[arg-type]
KINDS = {
    "experts": (EXPERTS, ("gptq", "awq")),
    "latent": (LATENT, ("fp8", "compressed-tensors")),
    "fused": (FUSED, ("gptq", "awq", "bitsandbytes", "fp8")),
    "biased": (BIASED, ("gptq", "fp8")),
}
BITNET = transformers.BitNetConfig(**SETTINGS)  # type: ignore[arg-type]
KINDS_OF_MORE = {
    "experts": (EXPERTS, ("hqq", "quark, fp4", "torchao", "squeezellm", "squeezellm, tables alone")),
    "fused": (FUSED, ("squeezellm", "quark, uint4")),
    "bitnet": (BITNET, ("bitnet",)),
}


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind][1]])
def test_layers_of_other_kinds_are_read(kind: str, name: str, tmp_path: Path) -> None:
    compare(tmp_path, FORMATS[name], KINDS[kind][0])


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS_OF_MORE for name in KINDS_OF_MORE[kind][1]]
)
def test_layers_of_other_kinds_are_read_in_each_variant(kind: str, name: str, tmp_path: Path) -> None:
    compare(tmp_path, (FORMATS | MORE_FORMATS)[name], KINDS_OF_MORE[kind][0])


@pytest.mark.whole
def test_quantized_output_layer(tmp_path: Path) -> None:
    written = layers.gptq(4, 64, symmetric=True, output_layer=True)
    settings: dict[str, Any] = SETTINGS | {"vocab_size": 216}  # whole words of codes
    compare(tmp_path, written, transformers.LlamaConfig(**settings))


def test_plan_names_the_format_and_counts_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, plain = write(tmp_path, FORMATS["gptq"])
    plans = []
    for folder in (ours, plain):
        assert main(["plan", str(folder), "--device", "cpu", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    its, other = plans
    assert its["checkpoint_format"] == "gptq: 4 bits, groups of 64" and its["quantization"] == "gptq"
    assert other["checkpoint_format"] is None and its["num_parameters"] > 0.99 * other["num_parameters"]
    assert its["weight_bytes"] < other["weight_bytes"]


INVALID_VALUES: tuple[Any, ...] = (
    None,
    "x",
    "re:(",
    -1,
    0,
    5,
    1.5,
    True,
    1 << 70,
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    {"a": {}},
)


def with_replaced_values(value: Any) -> Iterator[Any]:
    """Yield a section with one of its values replaced, at any depth."""
    if isinstance(value, dict):
        for key in value:
            for other in (*INVALID_VALUES, *with_replaced_values(value[key])):
                yield {**value, key: other}


@pytest.mark.parametrize("name", [*FORMATS, *MORE_FORMATS])
def test_any_quantization_section_is_read_or_rejected(name: str) -> None:
    written = (FORMATS | MORE_FORMATS)[name]
    for section in with_replaced_values({"quantization_config": dict(written.section)}):
        try:
            found = recognise(HfConfig(section, "config.json"))
            if found is not None:
                assert found.words
                found.scheme(StoredLayer("model.layers.0.mlp.up_proj", 128, 192, False, None))
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_need_no_checkpoint(name: str, tmp_path: Path) -> None:
    ours, _ = write(tmp_path, FORMATS[name])
    check_dummies(ours)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["experts", "latent", "fused"])
def test_dummy_weights_of_other_kinds(kind: str, tmp_path: Path) -> None:
    ours, _ = write(tmp_path, FORMATS["gptq"], KINDS[kind][0])
    check_dummies(ours)


def check_dummies(folder: Path) -> None:
    """Check that the model generates tokens without its weights."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    with one_torch_thread():
        outcome = alone(load(folder, load_format="dummy"), PROMPTS[:1])
    assert torch.isfinite(logits_of(outcome, 0, len(PROMPTS[0]))).all()


def test_packed_cache_stores_quantized_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    fill = PackedWeight.fill_codes

    def counting(self: PackedWeight, *arguments: Any) -> None:
        filled.append(self)
        fill(self, *arguments)

    monkeypatch.setattr(PackedWeight, "fill_codes", counting)
    ours, _ = write(tmp_path, FORMATS["gptq"])
    first = alone(load(ours, packed_cache=str(tmp_path / "cache")), PROMPTS)
    assert filled
    filled.clear()
    assert alone(load(ours, packed_cache=str(tmp_path / "cache")), PROMPTS).bits == first.bits
    assert not filled
    change(ours, {"bits": 8, "group_size": 32}, {})
    with pytest.raises(ConfigError, match=r"config\.json requires"):  # the file contains other numbers
        load(ours, packed_cache=str(tmp_path / "cache"))


def test_packed_cache_stores_tables_and_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = write(tmp_path, MORE_FORMATS["squeezellm"])
    first = alone(load(ours, packed_cache=str(tmp_path / "cache")), PROMPTS)
    monkeypatch.delattr("quintet.executor.checkpoints.quant.fill.fill_tables")  # nothing is filled
    assert alone(load(ours, packed_cache=str(tmp_path / "cache")), PROMPTS).bits == first.bits
    monkeypatch.undo()
    check_dummies(ours)


def change(folder: Path, change_hf_config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Change a checkpoint; None deletes a tensor."""
    path = folder / "config.json"
    hf_config = json.loads(path.read_bytes())
    hf_config["quantization_config"] |= change_hf_config
    path.write_text(json.dumps(hf_config))
    there = load_file(folder / "model.safetensors") | tensors
    save_file({name: each for name, each in there.items() if each is not None}, folder / "model.safetensors")


def test_flag_must_match_the_checkpoint(tmp_path: Path) -> None:
    ours, plain = write(tmp_path, FORMATS["gptq"])
    load(ours, quantization="gptq")
    with pytest.raises(ConfigError, match=r"--quantization int8, but .*gptq: 4 bits, groups of 64"):
        load(ours, quantization="int8")
    with pytest.raises(ConfigError, match=r"--quantization gptq is a checkpoint format"):
        load(plain, quantization="gptq")
    with pytest.raises(ConfigError, match="no tensor name contains 'qweight'"):
        hf_config = json.loads((plain / "config.json").read_bytes())
        (plain / "config.json").write_text(
            json.dumps(hf_config | {"quantization_config": FORMATS["gptq"].section})
        )
        load(plain)


def test_quantization_file_of_older_tools(tmp_path: Path) -> None:
    ours, _ = write(tmp_path, FORMATS["gptq"])
    hf_config = json.loads((ours / "config.json").read_bytes())
    section = hf_config.pop("quantization_config")
    section.pop("quant_method")
    (ours / "config.json").write_text(json.dumps(hf_config))
    (ours / "quantize_config.json").write_text(json.dumps(section))
    assert load(ours).config.executor.quantization == "gptq"


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("hf_config", "tensors", "words"),
    [
        ({}, {f"{LAYER}.scales": None}, rf"'{LAYER}\.scales' \[3, 128\] is missing"),
        (
            {},
            {f"{LAYER}.qweight": torch.zeros(24, 127, dtype=torch.int32)},
            r"has shape \[24, 127\].*requires \[24, 128\]",
        ),
        ({}, {f"{LAYER}.qweight": torch.zeros(24, 128)}, "number format F32; it must be one of I32"),
        (
            {},
            {f"{LAYER}.qzeros": torch.zeros(3, 16, dtype=torch.int32)},
            f"layer '{LAYER}'.*zero points other than 8",
        ),
        ({}, {f"{LAYER}.more": torch.zeros(2)}, f"'{LAYER}.more'.*does not have it"),
        ({}, {f"{LAYER}.bias": torch.ones(128)}, f"layer '{LAYER}'.*the checkpoint has a bias"),
        ({"bits": 5}, {}, r"quantization_config\.bits is 5; it must be 2, 3, 4 or 8"),
        ({"group_size": 0}, {}, "group_size is 0; it must be -1 or a number of columns"),
        ({"checkpoint_format": "marlin"}, {}, "'marlin'.*use the original"),
        ({"dynamic": {"-:(a+)+$": {}}}, {}, "without repeated groups"),
        ({"quant_method": "gptqq"}, {}, "the nearest supported format is 'gptq'"),
    ],
)
def test_load_error_is_one_line(
    hf_config: dict[str, Any], tensors: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    ours, _ = write(tmp_path, FORMATS["gptq"])
    change(ours, hf_config, tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        load(ours)
    assert "\n" not in str(caught.value)


SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            layers.compressed(W4, "pack-quantized", sparsity_config=SPARSE).section,
            "sparse weights.*dense original checkpoint",
        ),
        (
            layers.compressed(W4, "pack-quantized", transform_config={"config_groups": {"u": {}}}).section,
            "transform_config.*without transforms",
        ),
        (
            layers.compressed(W4, "marlin-24").section,
            "format 'marlin-24'.*compressed-tensors are pack-quantized",
        ),
        (
            layers.compressed(W4, "nvfp4-pack-quantized").section,
            "num_bits is 4, of type int, in the format nvfp4",
        ),
        (layers.compressed(W4 | {"num_bits": 9}, "pack-quantized").section, "num_bits is 9"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear"}}},
            "targets is 'Linear'; it must be a list",
        ),
        ({"quant_method": "awq", "bits": 3}, "bits is 3; it must be 4"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "'gemv_fast'.*`version` 'gemm' or 'gemv'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size is .128.; it must be two whole numbers",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit and load_in_8bit are both false"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "it must be uint8: save the model again",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ'.*supported: FP8, FP8_PER_CHANNEL_PER_TOKEN",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:itrex"},
            "packing_format 'auto_round:itrex'",
        ),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "it must be offline: use the packed"),
        ({"quant_method": "auto-round", "act_bits": 8}, "act_bits is 8; it must be 16"),
        (
            {"quant_method": "auto-round", "data_type": "mx_int", "bits": 4},
            "data_type is 'mx_int' of 4 bits.*mx_fp \\(4, 8\\)",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}},
            "dtype is 'int3' with scales None.*supported: fp8_e4m3",
        ),
        ({"quant_method": "quark", "layer_quant_config": {"*": {}}}, "global_quant_config is missing"),
        (
            {"quant_method": "quark", "layer_type_quant_config": {"Linear": {}}},
            "quantization by layer type",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}},
            "weight is .*; it must be one object",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quant_type 'int4_weight_only'.*save it as safetensors",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "UIntXWeightOnlyConfig", "_data": {}}},
            },
            "'UIntXWeightOnlyConfig'.*supported: Int8WeightOnlyConfig",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "Int4WeightOnlyConfig",
                        "_data": {"int4_packing_format": "preshuffled"},
                    }
                },
            },
            "'preshuffled'.*packing format 'plain'",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {
                        "_type": "IntxWeightOnlyConfig",
                        "_data": {"mapping_type": {"_type": "MappingType", "_data": "TERNARY"}},
                    }
                },
            },
            "mapping_type is .*'TERNARY'.*; it must be one of SYMMETRIC, SYMMETRIC_NO_CLIPPING_ERR, ASYMMETRIC",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"re:(a)*": None}}}
                },
            },
            r"quant_type\.default\._data\.fqn_to_config has the pattern",
        ),
        ({"quant_method": "torchao", "include_input_output_embeddings": True}, "quantized embeddings"),
        ({"quant_method": "squeezellm", "wbits": 2}, "wbits is 2; it must be 3 or 4"),
        ({"quant_method": "hqq"}, "quant_config is missing; it must be an object with weight_quant_params"),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {}, "zero_quant_params": {"nbits": 8}},
            },
            "quantized scales or zero points.*quant_zero false",
        ),
        ({"quant_method": "mxfp4"}, "only for gpt-oss's experts"),
        ({"quant_method": 4}, "quant_method is 4; it must be the name of a format"),
    ],
)
def test_unsupported_variant_is_rejected_by_its_configuration(
    section: dict[str, Any], words: str, tmp_path: Path
) -> None:
    hf_config = {"architectures": ["LlamaForCausalLM"], "quantization_config": dict(section)}
    with pytest.raises(ConfigError, match=words) as caught:
        recognise(HfConfig(hf_config, "config.json"))
    assert "\n" not in str(caught.value)


def test_flag_accepts_every_format() -> None:
    assert set(FORMATS_BY_METHOD) < set(get_args(Quantization))


def test_bias_of_zeros_is_dropped(tmp_path: Path) -> None:
    ours, _ = write(tmp_path, FORMATS["gptq"])
    change(ours, {}, {f"{LAYER}.bias": torch.zeros(128)})
    load(ours)


def test_squeezellm_is_detected_by_its_original_files(tmp_path: Path) -> None:
    ours, _ = write(tmp_path, MORE_FORMATS["squeezellm"])
    tensors = load_file(ours / "model.safetensors")
    (ours / "model.safetensors").unlink()
    torch.save(tensors | {f"sparse_threshold.{LAYER}": 7}, ours / "sq-llama-w4-s5.pt")
    hf_config = json.loads((ours / "config.json").read_bytes())
    del hf_config["quantization_config"]
    (ours / "config.json").write_text(json.dumps(hf_config))
    (ours / "quant_config.json").write_text(json.dumps({"wbits": 4}))
    assert load(ours).config.executor.quantization == "squeezellm"


@pytest.mark.parametrize(
    ("ending", "other", "words"),
    [
        ("rows", torch.full((129,), 1 << 30, dtype=torch.int32), "row pointers of the"),
        ("cols", None, "has outliers in 'rows', but the tensor 'cols' is missing"),
    ],
)
def test_invalid_outliers_are_rejected(
    ending: str, other: torch.Tensor | None, words: str, tmp_path: Path
) -> None:
    ours, _ = write(tmp_path, MORE_FORMATS["squeezellm"])
    change(ours, {}, {f"{LAYER}.{ending}": other})
    with pytest.raises(ConfigError, match=words) as caught:
        load(ours)
    assert LAYER in str(caught.value) and "\n" not in str(caught.value)
