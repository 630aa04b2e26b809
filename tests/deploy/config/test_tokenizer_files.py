"""Cache of converted tokenizers, and of tokenizers with all declared tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.gguf.vocabularies import KINDS, write_file
from tokenizers import AddedToken, Regex, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from quintet.deploy.config.model.stop_tokens import end_token_ids
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.deploy.config.model.tokenizer_json import LLAMA3, completed
from quintet.tokenizer_proc.template_files import special_tokens
from quintet.wire.errors import ConfigError


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a slow tokenizer; its conversion is simulated."""

    def convert(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "tokenizer.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    return folder


@pytest.mark.parametrize("name", ["vocab.txt", "added_tokens.json", "tokenizer_config.json"])
def test_a_changed_file_is_converted_again(name: str, slow: Path, tmp_path: Path) -> None:
    first = tokenizer_folder(slow, tmp_path / "cache")
    (slow / name).write_text("changed")
    second = tokenizer_folder(slow, tmp_path / "cache")
    assert first != second == tokenizer_folder(slow, tmp_path / "cache")


def test_an_interrupted_conversion_is_repeated(
    slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str], **options: Any) -> None:
        (Path(command[-1]) / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer_folder(slow, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    assert (tokenizer_folder(slow, tmp_path / "cache") / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_cache_that_is_not_writable_is_named(is_gguf: bool, slow: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_file(KINDS["SentencePiece"], file)
    with pytest.raises(ConfigError, match=r"the cache .*model\.gguf/cache is not writable .*XDG_CACHE_HOME"):
        tokenizer_folder(file if is_gguf else slow, file / "cache")


VOCAB = {"a": 0, "b": 1, "word": 2}


@pytest.mark.parametrize("declared", [{}, {"bos_token": "<own>"}], ids=str)
def test_a_converted_tekken_has_bos_and_names_of_special_tokens(
    declared: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models with ``tekken.json`` only, as Mistral Small 3.2 and Devstral."""

    def convert(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        made = Path(command[-1])
        tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<own>"])
        tokenizer.save(str(made / "tokenizer.json"))
        (made / "tokenizer_config.json").write_text(json.dumps({"backend": "tokenizers"} | declared))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    (tmp_path / "tekken.json").write_text("{}")
    folder = tokenizer_folder(tmp_path, tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = declared.get("bos_token", "<s>")
    assert tokenizer.encode("word").tokens == [bos, "word"]
    assert tokenizer.encode("word", add_special_tokens=False).tokens == ["word"]
    found = special_tokens({}, json.loads((folder / "tokenizer_config.json").read_text()))
    assert (found["bos_token"], found["eos_token"]) == (bos, "</s>")
    assert end_token_ids([], folder, {}) == [5]


def write_tokenizer(folder: Path, declared: dict[str, Any]) -> Path:
    """Write a tokenizer with one added token, and these tokens in ``tokenizer_config.json``."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    tokenizer.add_tokens([AddedToken("<own>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": declared}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("special", [False, True])
def test_declared_tokens_are_added_as_transformers_adds_them(tmp_path: Path, special: bool) -> None:
    declared = {
        "5": {"content": "<late>", "special": False, "rstrip": True},
        "4": {"content": "<call>", "special": special, "normalized": False},
        "2": {"content": "word", "special": special},
        "3": {"content": "<own>"},
    }
    folder = write_tokenizer(tmp_path / "model", declared)
    found = tokenizer_folder(folder, tmp_path / "cache")
    assert found != folder and found == tokenizer_folder(folder, tmp_path / "cache")
    ours = Tokenizer.from_file(str(found / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in ("<call>word<late>  b", "<own><call>"):
        assert ours.encode(text).ids == theirs.encode(text)
    assert json.loads((found / "tokenizer_config.json").read_text())["added_tokens_decoder"] == declared


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"3": {"content": "<own>"}},
        {"9": {"content": "<far>"}},
        {"1": {"content": "<call>"}},
        {"x": {"content": "<call>"}, "4": "<call>", "5": {"content": 7}},
    ],
    ids=str,
)
def test_folder_without_further_tokens_is_used_itself(tmp_path: Path, declared: dict[str, Any]) -> None:
    folder = write_tokenizer(tmp_path / "model", declared)
    assert tokenizer_folder(folder, tmp_path / "cache") == folder


def test_a_declared_token_without_text_takes_no_id() -> None:
    tokenizer = json.dumps({"added_tokens": [], "model": {"vocab": {"a": 0}}}).encode()
    declared = {"1": {"content": ""}, "2": {"content": "<x>"}}
    assert completed(tokenizer, {"added_tokens_decoder": declared}) is None


LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
OWN = TemplateProcessing(single="$A b", pair=None, special_tokens=[("b", 1)])


def write_llama_tokenizer(folder: Path, **declared: Any) -> Path:
    """Write a tokenizer as DeepSeek publishes it: only ``tokenizer_config.json`` declares that BOS is added."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    tokenizer.add_special_tokens(["<bos>"])
    document = json.loads(tokenizer.to_str()) | {"post_processor": declared.pop("post_processor", LEVEL)}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": {"content": "<bos>"},
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | declared))
    return folder


@pytest.mark.parametrize("processor", [None, LEVEL, {"type": "Sequence", "processors": [LEVEL]}], ids=str)
def test_bos_that_only_the_configuration_declares_is_added(tmp_path: Path, processor: Any) -> None:
    folder = write_llama_tokenizer(tmp_path / "model", post_processor=processor)
    found = Tokenizer.from_file(str(tokenizer_folder(folder, tmp_path / "cache") / "tokenizer.json"))
    assert found.encode("word").ids == [3, 2]
    assert found.encode("word", add_special_tokens=False).ids == [2]


@pytest.mark.parametrize(
    "declared",
    [
        {"post_processor": json.loads(OWN.__getstate__())},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"add_bos_token": False},
        {"bos_token": None},
        {"bos_token": "<unknown>"},
    ],
    ids=str,
)
def test_post_processor_is_kept(tmp_path: Path, declared: dict[str, Any]) -> None:
    folder = write_llama_tokenizer(tmp_path / "model", **declared)
    assert tokenizer_folder(folder, tmp_path / "cache") == folder


@pytest.mark.parametrize("is_mistral", [True, False])
def test_tekken_has_its_own_expression(tmp_path: Path, is_mistral: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    tokenizer.add_special_tokens(["[INST]", "[AVAILABLE_TOOLS]" if is_mistral else "[OTHER]"])
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(LLAMA3), "isolated"), level])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = tokenizer_folder(tmp_path, tmp_path / "cache")
    assert (folder != tmp_path) == is_mistral
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert found is not None
    words = (
        ["e", "Bay", "\u0120Na", "OH", "\u0120", "1", "2"]
        if is_mistral
        else ["eBay", "\u0120NaOH", "\u0120", "12"]
    )
    assert [word for word, _ in found.pre_tokenize_str("eBay NaOH 12")] == words
    if is_mistral:
        (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
        theirs = PreTrainedTokenizerFast._patch_mistral_regex(
            tokenizer, str(tmp_path), is_local=True, fix_mistral_regex=True
        )
        assert found.pre_tokenize_str("eBay NaOH 12\n\n/") == theirs.pre_tokenizer.pre_tokenize_str(
            "eBay NaOH 12\n\n/"
        )
