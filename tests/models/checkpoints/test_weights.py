"""Reading checkpoints: shards, ties, dtypes, and a one-line error for every invalid checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quintet.deploy.cli.main import main
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.weights import read_weight_facts
from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.backends.registry import make_worker
from quintet.executor.checkpoints.weights.files import checkpoint_files
from quintet.executor.checkpoints.weights.load import random_tensor, random_tensor_on
from quintet.executor.checkpoints.weights.plan import Expected
from quintet.executor.model_config.families.llama import llama
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.model import CausalModel, Setting
from quintet.wire.errors import ConfigError


def tiny() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_are_read_through_their_index(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny(), max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


def test_weights_use_preallocated_memory(serve: Callable[..., Any]) -> None:
    served = serve(tiny())
    ahead = HugeMemory(64 << 20)
    served.core.worker = make_worker(served.config, ahead=ahead)
    assert 0 < ahead.length < 64 << 20, "unused memory is released"
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


def test_missing_shard_is_named(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny(), max_shard_size="20KB")
    next(iter(tmp_path.glob("model-*2-of-*.safetensors"))).unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-\d+\.safetensors: is missing"):
        make_worker(served.config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"'model\.layers\.1\.mlp\.up_proj\.weight' \[48, 32\] is missing",
        ),
        (
            lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 3)}),
            r"'model\.layers\.7\.mlp\.up_proj\.weight' \[2, 3\]: config\.json",
        ),
        (
            lambda tensors: tensors.update({"model.nrom.weight": tensors.pop("model.norm.weight")}),
            r"unexpected tensor 'model\.nrom\.weight' \[32\]; config\.json's architecture expects 'model\.norm\.weight'",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"'model\.norm\.weight' has shape \[31\]; config\.json requires \[32\]",
        ),
    ],
    ids=["missing", "extra", "misspelt", "mis-shaped"],
)
def test_invalid_tensor_error_names_it_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], object],
    words: str,
    serve: Callable[..., Any],
    tmp_path: Path,
) -> None:
    served = serve(tiny())
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=words) as caught:
        make_worker(served.config)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, name: tensors.pop(name), "is missing"),
        (lambda tensors, name: tensors.update({name[1:]: tensors.pop(name)}), "is misspelt"),
        (lambda tensors, name: tensors.update({"x." + name: torch.ones(3)}), "does not have it"),
        (lambda tensors, name: tensors.update({name: torch.ones(3)}), "has shape"),
    ],
    ids=["missing", "misspelt", "extra", "mis-shaped"],
)
def test_invalid_tensor_of_a_shard_error_names_it_in_one_line(
    change: Callable[[dict[str, torch.Tensor], str], object],
    words: str,
    serve: Callable[..., Any],
    tmp_path: Path,
) -> None:
    served = serve(tiny(), max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    name = min(tensors)
    change(tensors, name)
    save_file(tensors, shard)
    with pytest.raises(ConfigError, match=words) as caught:
        make_worker(served.config)
    assert "\n" not in str(caught.value) and name[1:] in str(caught.value)
    assert words == "is missing" or shard.name in str(caught.value)


def test_buffers_of_old_checkpoints_are_ignored(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    names = ("inv_freq", "cos_cached", "sin_cached")
    buffers = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8) for name in names}
    rewrite(tmp_path, lambda tensors: tensors.update(buffers))
    make_worker(served.config)


@pytest.mark.parametrize("has_embedding", [True, False])
def test_tied_checkpoint_accepts_either_embedding_name(
    has_embedding: bool, serve: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny()
    config.tie_word_embeddings = True
    served = serve(config)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if not has_embedding:
            del tensors["model.embed_tokens.weight"]

    rewrite(tmp_path, change)
    served.core.worker = make_worker(served.config)
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


def with_other_head(served: Any) -> Callable[[dict[str, torch.Tensor]], object]:
    """Give the reference another output layer; return a function that writes it into a checkpoint."""
    head = torch.randn_like(served.reference.lm_head.weight)
    served.reference.lm_head.weight = torch.nn.Parameter(head)
    return lambda tensors: tensors.update({"lm_head.weight": head})


def test_output_layer_of_a_tied_config_is_used_if_it_differs(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny()
    config.tie_word_embeddings = True
    served = serve(config)
    rewrite(tmp_path, with_other_head(served))
    hf_config = read_facts(tmp_path, with_weights=True).hf_config
    model = msgspec.structs.replace(served.config.model, hf_config=hf_config)
    served.core.worker = make_worker(msgspec.structs.replace(served.config, model=model))
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


def test_pickled_weights_that_contradict_a_tied_config_are_rejected(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny()
    config.tie_word_embeddings = True
    served = serve(config)
    rewrite(tmp_path, with_other_head(served))
    pickled(tmp_path)
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' is not 'model\.embed_tokens\.weight'"):
        make_worker(served.config)


def pickled(folder: Path, num_files: int = 1, **options: Any) -> None:
    """Replace the folder's safetensors by pickles of torch."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(dict(tensors), folder / "pytorch_model.bin", **options)
        return
    names = [f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin" for i in range(num_files)]
    for i, name in enumerate(names):
        torch.save(dict(tensors[i::num_files]), folder / name, **options)
    weight_map = {key: names[i % num_files] for i, (key, _) in enumerate(tensors)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("num_files", "options"),
    [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})],
    ids=["one-file", "shards", "before-torch-1.6"],
)
def test_pickled_weights_are_read_and_converted(
    num_files: int,
    options: dict[str, bool],
    serve: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = serve(tiny())
    pickled(tmp_path, num_files, **options)
    facts = read_weight_facts(tmp_path)
    assert facts.num_parameters is None and facts.size_bytes > 0
    expected = served.greedy([[1, 2, 3]], 8)[0]
    for converted in (False, True):
        if converted:
            assert main(["convert", str(tmp_path)]) == 0
            assert len(checkpoint_files(tmp_path)) == num_files
        with caplog.at_level("INFO", "quintet"):
            caplog.clear()
            served.core.worker = make_worker(served.config)
        request = served.core.add([1, 2, 3], max_tokens=8)
        served.core.run()
        assert request.outputs == expected
        assert [f"quintet convert {tmp_path}" in line for line in caplog.messages].count(True) == (
            not converted
        )
    assert main(["convert", str(tmp_path)]) == 78  # nothing to convert


class Program:
    """Code that a pickle may run when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model.norm.weight": Program()}, "torch's weights-only reader rejects it"),
        ([torch.ones(2)], "is not a dictionary of tensors"),
        ({"epoch": 3}, "entry 'epoch' of type int"),
        (b"not a pickle", "rejects it"),
    ],
    ids=["program", "list", "number", "noise"],
)
def test_other_pickles_are_rejected(
    content: object,
    words: str,
    serve: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = serve(tiny())
    (tmp_path / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=words) as caught:
        make_worker(served.config)
    assert "\n" not in str(caught.value) and "pytorch_model.bin" in str(caught.value)
    assert "it ran" not in capsys.readouterr().out


def test_other_formats_are_rejected_with_advice(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    (tmp_path / "model.safetensors").rename(tmp_path / "model.pt")
    with pytest.raises(ConfigError, match="save_pretrained"):
        make_worker(served.config)


@pytest.mark.parametrize("change", [lambda name: name.removeprefix("model."), lambda name: f"model.{name}"])
def test_tensor_prefix_is_optional(
    change: Callable[[str], str], serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve(tiny())

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if not name.startswith("model.") or not change(name).startswith("model.model."):
                tensors[change(name)] = tensors.pop(name)

    rewrite(tmp_path, rename)
    served.core.worker = make_worker(served.config)
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


def test_no_weights_at_all(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="dummy"):
        make_worker(served.config)


def test_broken_file_is_named(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    for raw, reason in (
        (b"not safetensors at all", "the header claims"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ):
        (tmp_path / "model.safetensors").write_bytes(raw)
        with pytest.raises(ConfigError, match=rf"model\.safetensors: not a readable .*{reason}"):
            make_worker(served.config)


def test_index_cannot_point_outside_the_folder(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="not a file name"):
        make_worker(served.config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_generate(dtype: str, serve: Callable[..., Any]) -> None:
    served = serve(tiny())
    model = msgspec.structs.replace(served.config.model, dtype=dtype)
    served.core.worker = make_worker(msgspec.structs.replace(served.config, model=model))
    requests = [served.core.add([5, 6, 7], max_tokens=6), served.core.add(list(range(20)), max_tokens=6)]
    served.core.run(chunk=9)
    assert all(0 <= token < 61 for request in requests for token in request.outputs)


def test_dummy_weights_are_seeded(serve: Callable[..., Any]) -> None:
    outputs = []
    for seed in (1, 1, 2):
        served = serve(tiny())
        executor = msgspec.structs.replace(served.config.executor, load_format="dummy", seed=seed)
        served.core.worker = make_worker(msgspec.structs.replace(served.config, executor=executor))
        request = served.core.add([5, 6, 7], max_tokens=12)
        served.core.run()
        outputs.append(request.outputs)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_on_a_device_have_the_same_distribution(dtype: torch.dtype) -> None:
    expected = Expected((300, 500), 0.02, [], [])
    on_host = random_tensor("a", expected, dtype, 3).float()
    there = random_tensor_on(torch.device("cpu"), "a", expected, dtype, 3).float()
    assert there.shape == on_host.shape
    for drawn in (
        on_host,
        there,
    ):  # either sign, between a power of two and its double, which no rounding moves
        assert drawn.abs().min() >= 2.0**-6 and drawn.abs().max() <= 2.0**-5
        # the seven bits of bf16's mantissa, cut rather than rounded, take 0.5 % off; chance adds 0.1 % (one deviation)
        assert drawn.square().mean().item() == pytest.approx(7 / 3 * 4.0**-6, rel=0.01)
        assert abs(drawn.mean().item()) < 3e-4  # five deviations
    again, other = (random_tensor_on(torch.device("cpu"), name, expected, dtype, 3) for name in "ab")
    assert torch.equal(again.float(), there) and not torch.equal(other.float(), there)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"quantization_config": {"quant_method": "gtpq"}}, "'gtpq'.*nearest supported format is 'gptq'"),
        ({"num_hidden_layers": 3}, "3 layers"),
        ({"vocab_size": 99}, "99 tokens in the vocabulary"),
        ({"hidden_size": None}, "hidden_size is missing; it must be an integer from 1"),
    ],
)
def test_unsupported_config_is_rejected(
    change: dict[str, Any], words: str, serve: Callable[..., Any]
) -> None:
    config = serve(tiny()).config
    hf_config = json.dumps(json.loads(config.model.hf_config) | change)
    with pytest.raises(ConfigError, match=words):
        make_worker(
            msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, hf_config=hf_config))
        )


def test_restarted_executor_builds_the_original_model(serve: Callable[..., Any], tmp_path: Path) -> None:
    """After a restart the executor finds a folder with a replaced config."""
    served = serve(tiny())
    (tmp_path / "config.json").write_text("{}")
    assert make_worker(served.config)


def package_model(hf_config: HfConfig, setting: Setting) -> CausalModel:
    """Build the model of an installed package."""
    return Decoder(llama(hf_config), setting)


def test_installed_packages_can_add_architectures(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(tiny())
    entry = EntryPoint("OurForCausalLM", f"{__name__}:package_model", "quintet.models")

    def installed(group: str, name: str) -> EntryPoints:
        return EntryPoints([entry]).select(group=group, name=name)

    monkeypatch.setattr("quintet.executor.backends.platforms.platform.entry_points", installed)
    model = msgspec.structs.replace(served.config.model, architecture="OurForCausalLM")
    served.core.worker = make_worker(msgspec.structs.replace(served.config, model=model))
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]


@pytest.mark.parametrize(
    "rope", [{"rope_type": "proportional", "factor": 2.0}, {"full_attention": {"rope_type": "default"}}]
)
def test_unknown_rotation_is_left_to_the_package(
    serve: Callable[..., Any], tmp_path: Path, rope: dict[str, Any]
) -> None:
    serve(tiny())
    hf_config = json.loads((tmp_path / "config.json").read_bytes())
    hf_config |= {"architectures": ["OurForCausalLM"], "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    assert read_facts(tmp_path).spec.reach == hf_config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="rope_parameters"):
        read_facts(tmp_path)


def test_memory_for_no_block_is_rejected(serve: Callable[..., Any]) -> None:
    served = serve(tiny())
    cache = msgspec.structs.replace(served.config.cache, memory_bytes=100)
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        make_worker(msgspec.structs.replace(served.config, cache=cache))


def test_unknown_architecture_error_names_the_nearest(serve: Callable[..., Any]) -> None:
    served = serve(tiny())
    model = msgspec.structs.replace(served.config.model, architecture="Llama5ForCausalLM")
    with pytest.raises(ConfigError, match="Llama4ForCausalLM"):
        make_worker(msgspec.structs.replace(served.config, model=model))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data_offsets": [0, 1 << 40]}, "may be truncated"),
        ({"data_offsets": [128, 0]}, "may be truncated"),
        ({"data_offsets": [-128, 0]}, r"data_offsets \[-128, 0\]"),
        ({"data_offsets": [0, True]}, "data_offsets"),
        ({"data_offsets": [0, 64]}, r"of shape \[32\] takes 64 bytes"),
        ({"shape": [1 << 62, 4]}, "takes 128 bytes"),
        ({"shape": [32.0]}, "shape"),
        ({"shape": "32"}, "shape"),
        ({"dtype": "F4"}, "number format 'F4'"),
    ],
)
def test_header_is_validated(
    change: dict[str, Any], words: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve(tiny())
    path = tmp_path / "model.safetensors"
    header, tensors = header_of(path)
    encoded = json.dumps(header | {NORM: header[NORM] | change}).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        make_worker(served.config)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x02",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 9) + b"[" * 9,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 4) + b"\xff\xfe{}",
    ],
)
def test_invalid_header_bytes(raw: bytes, serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file") as caught:
        make_worker(served.config)
    assert "\n" not in str(caught.value)


def test_tensors_at_odd_offsets(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(tiny())
    path = tmp_path / "model.safetensors"
    header, tensors = header_of(path)
    encoded = json.dumps(header).encode()
    encoded += b" " * ((1 - len(encoded)) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + tensors)
    served.core.worker = make_worker(served.config)
    request = served.core.add([1, 2, 3], max_tokens=8)
    served.core.run()
    assert request.outputs == served.greedy([[1, 2, 3]], 8)[0]
