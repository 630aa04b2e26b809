"""Conversion of a tokenizer folder to GGUF metadata: the inverse of `tokenizer`.

GGUF identifies pre-tokenizers by name. The matching name is found by comparing splits of probe texts, on which all
pre-tokenizers differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Cuts

from quintet.deploy.config.gguf.pre_tokenizers import PRE_TOKENIZERS
from quintet.deploy.config.gguf.tokenizer import SAMPLING
from quintet.deploy.config.model.chat_templates import DEFAULT, read_chat_templates
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import read_json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types: ``tokenizer.ggml.token_type``."""
_KEY = "tokenizer.ggml."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_PROBES = (
    "I'm sure THEY'LL say it's Fine, we've 12345 reasons; he'D",
    "  two  spaces\t\ttabs \n\nlines\r\n  \n end  ",
    'x=3.14159;y[0]+=1;// don\'t\n\tif(a!=b){return "c_d";}',
    "héllo naïve Übung ÀÉ Straße ﬁ İstanbul camelCase HTTPServer iPhone",
    "e\u0301te\u0301 a\u0308 हिन्दी ไทย ﷺ العربية",
    "日本語のテキスト 中文，测试。 한국어 123４５６ ½ ² Ⅷ",
    "$100,000.00 #tag @user a@b.co --flag ~~ ``` <tag/> ^_^ |x| a+b 1+1",
    "emoji 👩‍👩‍👧 🇩🇪 \u200b\u00a0 … ۔ ، “quoted” —dash–",
    "ends!\n\nso?\r\n(\n  a   1  22 " + " " * 7 + "b" + " " * 20 + "c",
    "snake_case __init__ 0xFF 1e-9 2024-11-22 'quoted' ''s 'S's\n\n\n  indented\n",
)


def vocabulary_of(folder: Path, tokenizer_folder: Path, size: int) -> dict[str, Any]:
    """Return GGUF metadata of a model's tokenizer, chat templates, special tokens and sampling defaults.

    size: the model's vocabulary size. Added tokens beyond it are omitted, such as Gemma 3's image token in text models.
    Raises `ConfigError` for a tokenizer that GGUF cannot express.
    """
    path = tokenizer_folder / "tokenizer.json"
    described, config = read_json(path), read_json(folder / "config.json")
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise ConfigError(f"{path}: the tokenizer type is {kind!r:.40}; only BPE can be written as GGUF")
    tokenizer = Tokenizer.from_file(str(path))
    added_tokens: Any = described.get("added_tokens") or ()
    added = {each["id"]: each for each in added_tokens}
    if any(index >= size and index not in added for index in tokenizer.get_vocab().values()):
        raise ConfigError(
            f"{folder}: vocab_size is {size}, but the tokenizer has {tokenizer.get_vocab_size()} tokens"
        )
    is_spm = bool(model.get("byte_fallback"))
    metadata = (
        _sentencepiece(described, model, size) if is_spm else _byte_pairs(tokenizer, described, model, path)
    )
    metadata |= _tokens(tokenizer, added, model.get("unk_token"), size, is_spm)
    metadata |= _ends(folder, tokenizer_folder, tokenizer, config, size)
    templates = read_chat_templates(folder, None)
    metadata |= {
        f"tokenizer.chat_template{'' if name == DEFAULT else f'.{name}'}": text
        for name, text in templates.items()
    }
    return {f"{_KEY}{key}" if "." not in key else key: value for key, value in metadata.items()} | _sampling(
        folder
    )


def _tokens(
    tokenizer: Tokenizer, added: Mapping[int, Mapping[str, Any]], unknown: str | None, size: int, is_spm: bool
) -> dict[str, Any]:
    """Return all tokens and their types; ids without a token are unused."""
    by_id = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}

    def kind(index: int) -> int:
        token = by_id.get(index)
        if token is None:
            return UNUSED
        if token == unknown and is_spm:
            return UNKNOWN
        if index in added:
            return CONTROL if added[index].get("special") else USER_DEFINED
        return BYTE if is_spm and len(token) == 6 and token.startswith("<0x") else NORMAL

    return {
        "tokens": [by_id.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [kind(index) for index in range(size)],
    }


def _byte_pairs(
    tokenizer: Tokenizer, described: Mapping[str, Any], model: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    normalizer = described.get("normalizer") or {}
    for each in normalizer.get("normalizers", [normalizer]):
        if each.get("type", "NFC") != "NFC":  # GGUF writers omit NFC
            raise ConfigError(f"{path}: the normalizer {each['type']!r:.40} cannot be written as GGUF")
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges") or ()]
    return {
        "model": "gpt2",
        "pre": _pre_name(tokenizer.pre_tokenizer, bool(model.get("ignore_merges")), path),
        "merges": merges or ["t o"],  # llama.cpp requires at least one
    }


def _pre_name(cutter: PreTokenizer | None, whole_words: bool, path: Path) -> str:
    """Return the name of the equivalent pre-tokenizer, preferably with the same ``ignore_merges``."""
    wanted = None if cutter is None else [_words(cutter, text) for text in _PROBES]
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    found: list[tuple[bool, int, str]] = []
    for name, each in PRE_TOKENIZERS.items():
        cuts = Cuts([*(Split(Regex(cut), "isolated") for cut in each.cuts), level])
        if all(_words(cuts, text) == words for text, words in zip(_PROBES, wanted or (), strict=False)):
            found.append((each.whole_words != whole_words, len(found), name))
    if wanted is None or not found:
        raise ConfigError(
            f"{path}: GGUF has no equivalent pre-tokenizer; choose a compressed-tensors format, which keeps the tokenizer"
        )
    return min(found)[2]


def _words(cutter: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in cutter.pre_tokenize_str(text)]


def _sentencepiece(described: Mapping[str, Any], model: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return scores that decrease with merge order, as in SentencePiece."""
    vocab: Mapping[str, int] = model["vocab"]
    scores = [0.0] * size
    for rank, merge in enumerate(model.get("merges") or ()):
        index = vocab.get("".join(merge.split(" ", 1) if isinstance(merge, str) else merge))
        if index is not None and index < size and scores[index] == 0.0:
            scores[index] = -1.0 - rank
    text = str(described.get("normalizer")) + str(described.get("pre_tokenizer"))
    prefixed = (
        "Prepend" in text or "'prepend_scheme': 'first'" in text or "'prepend_scheme': 'always'" in text
    )
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefixed}


def _ends(
    folder: Path, tokenizer_folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any], size: int
) -> dict[str, Any]:
    """Return the ids of special tokens, and whether BOS and EOS are added."""
    named = _read(tokenizer_folder / "tokenizer_config.json")
    ids: dict[str, Any] = {}
    for key, name in _SPECIAL.items():
        token = named.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        index = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None and f"{key}_id" in config:
            index = next(iter(_all(config[f"{key}_id"])), None)
        if type(index) is int and 0 <= index < size:
            ids[f"{name}_token_id"] = index
    endings = _all(_read(folder / "generation_config.json").get("eos_token_id") or config.get("eos_token_id"))
    other = next((each for each in endings if each != ids.get("eos_token_id")), None)
    if endings and "eos_token_id" not in ids:
        ids["eos_token_id"], other = endings[0], next(iter(endings[1:]), None)
    if other is not None:
        ids["eot_token_id"] = other
    plain, whole = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    adds_bos = len(whole) > len(plain) and whole[0] == ids.get("bos_token_id")
    adds_eos = len(whole) > len(plain) and whole[-1] == ids.get("eos_token_id")
    return ids | {"add_bos_token": adds_bos, "add_eos_token": adds_eos}


def _all(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and each >= 0]


def _sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults."""
    found = _read(folder / "generation_config.json")
    values = {theirs: found.get(ours) for theirs, ours in SAMPLING.items()}
    return {
        key: value if SAMPLING[key] == "top_k" else float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _read(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}
