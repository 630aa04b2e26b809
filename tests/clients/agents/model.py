"""A scripted model without weights: the embedded tokenizer with tool tokens, and a chat template for agents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quintet.deploy.embedded import default_model_path

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 262_144


class Turn(NamedTuple):
    """A response, and the text at the end of its prompt."""

    after: str
    say: str


def call(name: str, arguments: dict[str, object]) -> str:
    """Format a call as the template does."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def make_model(folder: Path) -> Path:
    """Write the model's files, without weights."""
    folder.mkdir(parents=True)
    source = default_model_path()
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    shutil.copy(TEMPLATE, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_bytes())
    num_words = len(tokenizer["model"]["vocab"])
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": num_words + index, "content": mark, **plain} for index, mark in enumerate(MARKS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((source / "config.json").read_bytes())
    config |= {"max_position_embeddings": CONTEXT, "vocab_size": num_words + len(MARKS)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_script(path: Path, turns: Sequence[Turn]) -> Path:
    """Write the script of the mock executor."""
    path.write_text(json.dumps([turn._asdict() for turn in turns]))
    return path
