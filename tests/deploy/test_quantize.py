"""``quintet quantize``: one-line errors, complete files, and the reported loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet.deploy.cli.main import main
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.embedded import default_model_path
from quintet.deploy.tools.quantize import target
from quintet.deploy.tools.quantize.windows import WINDOW, window_of, windows_of_text
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES, Model, type_of
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def quantize(*words: str | Path) -> int:
    return main(["quantize", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the one-line error."""
    assert quantize(*words) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Config and tokenizer of the embedded model, with one layer."""
    folder = tmp_path / "model"
    folder.mkdir()
    source = Path(default_model_path())
    for path in (*source.glob("*.json"), *source.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    hf_config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": 1}))
    tensors = load_file(source / "model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name
    }
    save_file(kept, folder / "model.safetensors")
    return folder


def test_file_is_written_once_and_completely(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out.gguf"
    assert quantize(folder, out, "--format", "q4_k_m") == 0
    assert f"{out}: " in capsys.readouterr().out
    written = out.read_bytes()
    kinds = {each.type.name for _, each in read_parts(out).tensors()}
    assert kinds == {
        "F32",
        "Q4_K",
        "Q6_K",
        "Q8_0",
    }  # last of the down projections: its 640 inputs are no blocks of 256
    assert "already exists" in refused(capsys, folder, out, "--format", "q4_k_m")
    assert quantize(folder, out, "--format", "q8_0", "--overwrite") == 0
    assert out.read_bytes() != written
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "out.gguf"]


def test_class_of_a_training_wrapper_is_written(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    names = {"architectures": [f"FSDP{config['architectures'][0]}"]}
    (folder / "config.json").write_text(json.dumps(config | names))
    assert quantize(folder, tmp_path / "out.gguf", "--format", "f32") == 0


def test_failure_leaves_no_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    line = refused(capsys, folder, folder.parent / "out.gguf", "--format", "q4_0")
    assert line.endswith("tensor 'model.layers.0.mlp.up_proj.weight' has values that are not finite")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert "must end in .gguf" in refused(capsys, folder, tmp_path / "out", "--format", "q8_0")
    assert "does not exist" in refused(capsys, folder, tmp_path / "no" / "out.gguf", "--format", "q8_0")
    assert "cannot be read" in refused(capsys, folder, out, "--format", "q8_0", "--text", tmp_path / "no.txt")
    assert quantize(folder, out, "--format", "q8_0") == 0
    capsys.readouterr()
    assert "is a GGUF file" in refused(capsys, out, tmp_path / "again.gguf", "--format", "q4_0")
    hf_config = json.loads((folder / "config.json").read_bytes())
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(hf_config | {"quantization_config": section}))
    assert "is already quantized" in refused(capsys, folder, tmp_path / "b.gguf", "--format", "q4_0")
    (folder / "config.json").write_text(json.dumps(hf_config | {"model_type": "opt"}))
    assert "is not supported for GGUF output" in refused(
        capsys, folder, tmp_path / "b.gguf", "--format", "q4_0"
    )


def test_full_disk_is_detected_before_writing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1 << 20

    monkeypatch.setattr(target.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(ConfigError, match=r"needs .* but 1\.0 MiB is free"):
        target.check_space(tmp_path / "out.gguf", 2 << 20)


def test_folder_without_a_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(ConfigError, match=r"without config\.json"):
        target.check_target(tmp_path / "precious", overwrite=True)


def test_model_inside_the_target_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    for source in ("out", "out/model"):
        with pytest.raises(ConfigError, match=r"is OUT .*, or inside it"):
            target.check_apart(tmp_path / "out", tmp_path / source)
    target.check_apart(tmp_path / "out" / "other", tmp_path / "out" / "model")


def test_former_folder_is_restored_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "former"  # name of the temporary backup folder
    out.mkdir()
    (out / "config.json").write_text("former")

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError, match="Input/output error"), target.atomic_output(out) as made:
        made.mkdir()
        monkeypatch.setattr(target.os, "replace", fails)
    assert (out / "config.json").read_text() == "former"
    assert list(tmp_path.iterdir()) == [out]


def test_formats_are_listed_largest_first() -> None:
    shapes = {
        "attn_q": (4096, 4096),
        "attn_v": (1024, 4096),
        "ffn_up": (14336, 4096),
        "ffn_down": (4096, 14336),
    }
    tensors = {f"blk.{i}.{part}.weight": shape for i in range(32) for part, shape in shapes.items()}
    model = Model(num_layers=32, is_tied=False, heads_per_kv=4)
    sizes = [
        sum(type_of(mix, name, shape, model).num_bytes(math.prod(shape)) for name, shape in tensors.items())
        for mix in MIXES.values()
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_missing_config_key_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hf_config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(hf_config | {"model_type": "granite"}))
    line = refused(capsys, folder, tmp_path / "b.gguf", "--format", "q4_0")
    assert "config.json has no 'attention_multiplier'" in line


def test_missing_tokenizer_names_searched_paths(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (folder / "tokenizer.json").unlink()
    line = refused(capsys, folder, tmp_path / "b.gguf", "--format", "q4_0")
    assert line.endswith("has no tokenizer.json: copy the tokenizer.json of the model there first")


def test_evaluation_windows_fit_the_context(folder: Path) -> None:
    text = Path(json.__file__).read_text()
    assert window_of(1 << 20) == WINDOW
    hf_config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(hf_config | {"max_position_embeddings": 100}))
    assert {len(each) for each in windows_of_text(read_facts(folder), text)[:-1]} == {99}
    with pytest.raises(ConfigError, match="at least 3 are needed"):
        window_of(2)


@pytest.mark.whole
def test_loss_on_a_text_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.py").write_text(Path(json.__file__).read_text())
    words = ["--format", "q8_0", "--text", tmp_path / "text.py"]
    assert quantize(default_model_path(), tmp_path / "out.gguf", *words) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows] == ["weights", "before", "q8_0"]
    assert abs(float(rows[2][3])) < 0.01  # as of `int8` in tests/executor/checkpoints/test_quantized_loss.py
    assert float(rows[2][4].strip(" %")) > 95
