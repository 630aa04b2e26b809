"""Multi-token prediction layers of GGUF files: drafts are those of the folder's layers, and outputs are those without drafts."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from safetensors.torch import load_file

from quintet.deploy.config.model import tokenizer_files
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.writing.model import plan_of
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from quintet.wire.errors import ConfigError
from tests.gguf.files import write_model
from tests.models.equality import load, run
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.mtp_checkpoints import write
from tests.models.speculation.test_mtp import FLAG, check_drafts
from tests.models.test_engine import changed

FAMILIES = {
    "glm4 moe": None,
    "glm4 moe, three layers": None,
    "k-exaone": None,
    "qwen 3.5": gguf.MODEL_ARCH.QWEN35,
}
"""Families, and the architectures for which only later versions of the `gguf` package name these tensors."""
NEXTN = [each for each in gguf.MODEL_TENSOR if each.name.startswith("NEXTN_")]


@pytest.fixture(autouse=True)
def _as_in_later_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "_default_cache", lambda: tmp_path / "tokenizers")
    for arch in filter(None, FAMILIES.values()):
        monkeypatch.setitem(gguf.MODEL_TENSORS, arch, [*gguf.MODEL_TENSORS[arch], *NEXTN])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    reference, file = write(family, tmp_path), tmp_path / "model.gguf"
    write_model(tmp_path, file)
    assert any(".nextn.eh_proj." in name for name, _ in read_parts(file).tensors())
    check_drafts(reference, file)
    sizes = []
    for path in (tmp_path, file):
        speculative = load(path, speculative_config=FLAG).config.scheduler.speculative
        assert speculative is not None and speculative.draft is not None
        sizes.append(speculative.draft.weight_bytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("family", ["glm4 moe"])
def test_outputs_of_quantized_layers_are_those_without_drafts(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    file, prompts = tmp_path / "model.gguf", [[5, 6, 7, 8, 9, 10, 11], [3]]
    write_model(tmp_path, file, "q8_0")
    plain, loaded = load(file, "bfloat16"), load(file, "bfloat16", speculative_config=FLAG)
    drafting(loaded.worker)
    expected = run(plain, changed(plain.config), prompts)
    assert run(loaded, changed(loaded.config), prompts).outputs == expected.outputs


def test_tensors_without_a_place_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed version has no names for the prediction layers of the architecture."""
    write("qwen 3.5", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_files, "_default_cache", lambda: tmp_path / "tokenizers")
    assert "mtp.fc.weight" in load_file(tmp_path / "model.safetensors")
    assert not any(
        "mtp" in source for each in plan_of(tmp_path, MIXES["f32"]).tensors for source in each.laid.sources
    )
    write_model(tmp_path, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"has no tensors mtp\.fc\.\* of a multi-token prediction layer"):
        load(tmp_path / "model.gguf", speculative_config=FLAG)
