"""Chat templates, from a model folder to a rendered prompt: the same choice as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from tests.deploy.config.model_folder import write_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.chat_templates import read_chat_templates
from quintet.deploy.config.model.source import locate_model
from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.template_files import load_templates
from quintet.wire.chat import encode_messages
from quintet.wire.errors import ConfigError, RequestError
from quintet.wire.messages import ChatPrompt

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = {
    "default": "{{ bos_token }}plain:{{ messages[0].content }}",
    "tool_use": "tools:{{ tools|length }}",
    "rag": "rag:{{ messages[0].content }}",
}


def write_folder(folder: Path, chat_template: Any = None, files: dict[str, str] | None = None) -> Path:
    """Write a model with a tokenizer that both sides can load, and templates in the config or in separate files."""
    write_model(folder)
    Tokenizer(models.WordLevel({"hi": 0, "<s>": 1}, unk_token="hi")).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def templates_of(folder: Path, **options: Any) -> ChatTemplates:
    """Return the templates of a tokenizer process that serves this folder."""
    resolution = resolve(
        Options(model=str(folder), executor="mock", **options), Path("/nowhere/quintet-test")
    )
    return load_templates(resolution.config.model)


def render(templates: ChatTemplates, tools: Any = None, name: str | None = None) -> str:
    return templates.render(
        ChatPrompt(encode_messages(CHAT), json.dumps(tools).encode() if tools else b"", chat_template=name)
    )


def rendered_by_transformers(folder: Path, tools: Any = None, name: str | None = None) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        CHAT, tools=tools, chat_template=name, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


FOLDERS: dict[str, dict[str, Any]] = {
    "a list": {"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]},
    "a map": {"chat_template": NAMED},
    "files": {
        "chat_template": "of the config, which files replace",
        "files": {
            "chat_template.jinja": NAMED["default"],
            "additional_chat_templates/tool_use.jinja": NAMED["tool_use"],
            "additional_chat_templates/rag.jinja": NAMED["rag"],
        },
    },
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path, kind: str) -> None:
    folder = write_folder(tmp_path, **FOLDERS[kind])
    templates = templates_of(folder)
    assert sorted(templates.names) == sorted(NAMED)
    assert render(templates) == rendered_by_transformers(folder) == "<s>plain:hi"
    assert render(templates, TOOLS) == rendered_by_transformers(folder, TOOLS) == "tools:1"
    for tools in (None, TOOLS):
        assert render(templates, tools, "rag") == rendered_by_transformers(folder, tools, "rag") == "rag:hi"
    with pytest.raises(RequestError, match="default"):
        render(templates, None, "typo")


def test_flag_replaces_all_templates_of_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, NAMED)
    (tmp_path / "mine.jinja").write_text("mine:{{ messages[0].content }}")
    for given in ("mine:{{ messages[0].content }}", str(tmp_path / "mine.jinja")):
        templates = templates_of(folder, chat_template=given)
        assert render(templates) == render(templates, TOOLS) == "mine:hi"
        with pytest.raises(RequestError, match=r"\(default\)"):
            render(templates, None, "rag")


def test_missing_default_lists_the_template_names(tmp_path: Path) -> None:
    templates = templates_of(write_folder(tmp_path, {"rag": NAMED["rag"], "other": "x"}))
    assert render(templates, None, "rag") == "rag:hi"
    with pytest.raises(RequestError, match="rag, other but no default"):
        render(templates)


def test_precedence_of_template_sources(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert read_chat_templates(folder, None) == {}
    (folder / "tokenizer_config.json").write_text('{"chat_template": "C"}')
    assert read_chat_templates(folder, None) == {"default": "C"}
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor"}')
    assert read_chat_templates(folder, None) == {"default": "C"}
    (folder / "processor_config.json").write_text('{"chat_template": "P"}')
    assert read_chat_templates(folder, None) == {"default": "P"}
    (folder / "chat_template.json").write_text('{"chat_template": {"default": "J", "rag": "R"}}')
    assert read_chat_templates(folder, None) == {"default": "J", "rag": "R"}
    (folder / "chat_template.json").write_text('{"chat_template": ""}')
    (folder / "chat_template.jinja").write_text("")
    assert read_chat_templates(folder, None) == {"default": "P"}  # an empty template is none
    (folder / "chat_template.jinja").write_text("\ufeffF")  # a byte order mark
    assert read_chat_templates(folder, None) == {"default": "F"}
    assert read_chat_templates(folder, "{{ messages }}") == {"default": "{{ messages }}"}


def test_named_templates_are_fetched_from_the_hub_without_other_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [
        "config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja", "onnx/config.json", "x.safetensors",
        "onnx/x.jinja", "consolidated.safetensors",
    ]  # fmt: skip
    fetched: set[str] = set()

    def fetch(
        name: str,
        revision: str | None = None,
        allow_patterns: Any = None,
        ignore_patterns: Any = None,
        cache_dir: str | None = None,
    ) -> str:
        assert revision == "v1"
        fetched.update(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return "/cache/folder"

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert locate_model("owner/name", with_weights=True, revision="v1") == Path("/cache/folder")
    assert fetched == {
        "config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja", "x.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize("odd", [5, ["x"], [{"name": "a"}], [{"name": "a", "template": "b"}, 1], {"a": 1}])
def test_invalid_templates_are_named(tmp_path: Path, odd: Any) -> None:
    folder = write_folder(tmp_path, odd)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be a template"):
        read_chat_templates(folder, None)
