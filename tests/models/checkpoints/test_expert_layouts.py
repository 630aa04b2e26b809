"""Checkpoints with stacked experts, where the family has a tensor for each expert: transformers 5 writes either layout."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.equality import load, run
from tests.models.random_checkpoints import write_checkpoint
from tests.models.rows import moe, states
from tests.models.test_engine import changed

from quintet.deploy.config.model.hf_config import read_facts

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3]]
QWEN3, GLM4, QWEN3_5 = "qwen3 moe, some layers without experts", "glm4 moe", "qwen-moe 3.5"
ROWS = {QWEN3: moe.ROWS[QWEN3], GLM4: moe.ROWS[GLM4], QWEN3_5: states.ROWS[QWEN3_5]}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stack_experts(folder: Path) -> None:
    """Rewrite the checkpoint with one tensor of all gates and ups, and one of all downs, for each layer."""
    path = folder / "model.safetensors"
    tensors, parts = load_file(path), defaultdict[str, dict[tuple[int, str], torch.Tensor]](dict)
    for name in list(tensors):
        if (found := _EXPERT.fullmatch(name)) is not None:
            parts[found[1]][int(found[2]), found[3]] = tensors.pop(name)
    assert parts
    for stem, each in parts.items():
        experts = range(len(each) // 3)
        both = [torch.cat([each[index, "gate"], each[index, "up"]]) for index in experts]
        tensors[f"{stem}.gate_up_proj"] = torch.stack(both)
        tensors[f"{stem}.down_proj"] = torch.stack([each[index, "down"] for index in experts])
    save_file(tensors, path)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ROWS)
def test_stacked_experts_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    before = load(tmp_path)
    expected = run(before, changed(before.config), PROMPTS).outputs
    stack_experts(tmp_path)
    loaded = load(tmp_path)
    assert run(loaded, changed(loaded.config), PROMPTS).outputs == expected


@pytest.mark.parametrize("is_nested", [True, False])
def test_text_model_without_the_prefix_of_its_part_is_read(is_nested: bool, tmp_path: Path) -> None:
    """Tools that save the language model of Qwen 3.5 omit ``language_model`` in names, and ``text_config``."""
    row = states.ROWS["qwen 3.5, with vision"]
    write_checkpoint(row, tmp_path)
    before = load(tmp_path)
    expected = run(before, changed(before.config), PROMPTS).outputs
    path = tmp_path / "model.safetensors"
    save_file({name.replace(".language_model.", "."): each for name, each in load_file(path).items()}, path)
    if not is_nested:
        config = json.loads((tmp_path / "config.json").read_bytes())
        names = {"architectures": config["architectures"]}
        (tmp_path / "config.json").write_text(json.dumps(config["text_config"] | names))
    loaded = load(tmp_path)
    assert run(loaded, changed(loaded.config), PROMPTS).outputs == expected


def test_separate_experts_are_recognised(tmp_path: Path) -> None:
    write_checkpoint(ROWS[QWEN3], tmp_path)
    assert "stacked_experts" not in read_facts(tmp_path, with_weights=True).hf_config
    stack_experts(tmp_path)
    assert "stacked_experts" in read_facts(tmp_path, with_weights=True).hf_config
