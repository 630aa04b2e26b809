"""Folders that `quintet convert` writes from GGUF files: logits of Quintet and of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from quintet.deploy.cli.main import main
from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.wire.errors import EXIT_CONFIG
from tests.gguf.files import write_model
from tests.gguf.random_blocks import in_blocks, of_gpt_oss
from tests.gguf.test_packed import WIDE, as_q4_k_m
from tests.models.equality import alone, load, logits_of
from tests.models.random_checkpoints import Expectation, batched_logits, of_transformers
from tests.models.rows import moe
from tests.models.test_equal import made

CLOSE = 0.1
"""Maximum error of logits after rounding to bf16, in standard deviations: 0.03 here, above 1 for a wrong matrix."""


def furthest_first_token(folder: Path, expected: Sequence[Expectation]) -> float:
    """Return the maximum error of the logits after prompts: later tokens may differ after a near tie."""
    outcome = alone(load(folder), [each.prompt for each in expected])
    found = (logits_of(outcome, i, len(each.prompt))[0] for i, each in enumerate(expected))
    return max(
        float((logits - each.logits[0]).abs().amax() / each.logits[0].std())
        for logits, each in zip(found, expected, strict=True)
    )


def converted(file: Path) -> Path:
    out = file.parent / ("a folder beneath which no socket could have a name " * 2).strip() / "converted"
    out.parent.mkdir()
    assert main(["convert", str(file), str(out)]) == 0
    return out


@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
def test_a_converted_folder_has_the_logits_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    expected = made(in_blocks(of_transformers("Qwen2Config", **WIDE), as_q4_k_m, file), tmp_path)
    out = converted(file)
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
    assert furthest_first_token(out, expected) < CLOSE
    tensors, stored = (
        load_file(out / "model.safetensors"),
        {each.name: each for each in gguf.GGUFReader(file).tensors},
    )
    up = stored["blk.0.ffn_up.weight"]
    wanted = torch.from_numpy(gguf.dequantize(up.data, up.tensor_type).copy()).bfloat16()
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], wanted)
    assert tensors["model.norm.weight"].dtype == torch.float32
    model = transformers.Qwen2ForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    logits = batched_logits(model.eval())
    with torch.inference_mode():
        for each in expected:
            (rows,) = logits([each.prompt])
            assert (rows[-1] - each.logits[0]).abs().amax() < CLOSE * each.logits[0].std()


def test_a_file_larger_than_the_memory_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_transformers("LlamaConfig").make(tmp_path)
    write_model(tmp_path, tmp_path / "model.gguf")
    monkeypatch.setattr("quintet.deploy.config.build.available_ram_bytes", lambda: 1 << 10)
    assert (converted(tmp_path / "model.gguf") / "model.safetensors").exists()


def test_a_converted_folder_is_quantized_from_exact_numbers(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    in_blocks(of_transformers("Qwen2Config", **WIDE), as_q4_k_m, file).make(tmp_path)
    out, again = tmp_path / "converted", tmp_path / "again.gguf"
    assert main(["convert", str(file), str(out), "--dtype", "float32"]) == 0
    assert main(["quantize", str(out), str(again), "--format", "f32"]) == 0

    def numbers(path: Path) -> dict[str, torch.Tensor]:
        tensors = gguf.GGUFReader(path).tensors
        return {
            each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
            for each in tensors
        }

    first, second = numbers(file), numbers(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.whole
@pytest.mark.parametrize(
    "family",
    ["LlamaConfig", "Gemma2Config", "MixtralConfig", "GptOssConfig"],
)
def test_other_families_are_converted_and_loaded(family: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    if family == "GptOssConfig":
        more = moe.GPT_OSS | WIDE | {"swiglu_limit": 7.0, "intermediate_size": 256}
        expected = made(of_gpt_oss(of_transformers(family, **more), file), tmp_path)
    else:
        expected = made(of_transformers(family, **WIDE), tmp_path)
        write_model(tmp_path, file, "f32")
    assert furthest_first_token(converted(file), expected) < CLOSE


def test_an_impossible_conversion_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    of_transformers("LlamaConfig").make(tmp_path)
    write_model(tmp_path, file)
    capsys.readouterr()

    def refused(*words: str | Path) -> str:
        assert main(["convert", *map(str, words)]) == EXIT_CONFIG
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "which needs no conversion; pass an output folder OUT" in refused(file)
    assert "must be a folder, not a .gguf file" in refused(file, tmp_path / "out.gguf")
    assert "is for GGUF files" in refused(tmp_path, tmp_path.parent / "out")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/config.json").write_text(json.dumps({}))
    assert "already exists" in refused(file, tmp_path / "there")
    assert "choose another path" in refused(file, tmp_path, "--overwrite") and file.exists()
    assert "--overwrite requires OUT" in refused(tmp_path, "--overwrite")
    assert "--dtype requires OUT" in refused(tmp_path, "--dtype", "float32")
