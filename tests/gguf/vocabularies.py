"""Small vocabularies as GGUF files, strings to tokenize, and their ids in llama.cpp.

To write ``vocabularies.json`` and ``expected_ids.json``, run

    python -m tests.gguf.vocabularies

with llama-cpp-python 0.3.36 in ``~/.cache/quintet-peers/llamacpp`` (``python -m bench.peers install`` makes it).
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf

HERE = Path(__file__).parent
VOCABULARIES, EXPECTED = HERE / "vocabularies.json", HERE / "expected_ids.json"
LLAMA_CPP = Path.home() / ".cache/quintet-peers/llamacpp/bin/python"
NUM_EXPECTED = 120
"""Number of strings with recorded ids."""

_LLAMA_CPP_IDS = """
import json, sys
from llama_cpp import Llama
files, strings = json.load(sys.stdin)
def ids(model, **how):
    return [model.tokenize(each.encode(), **how) for each in strings]
ids_by_file = {}
for name, file in files.items():
    model = Llama(file, vocab_only=True, verbose=False)
    ids_by_file[name] = [ids(model, add_bos=False, special=True), ids(model, add_bos=True, special=True)[:3]]
print(json.dumps(ids_by_file))
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A tokenizer: a vocabulary and the file's metadata for it."""

    vocabulary: str
    pre: str | None = None
    flags: tuple[tuple[str, bool], ...] = ()


BPE_PRES = (
    "default",
    "llama-bpe",
    "glm4",
    "qwen2",
    "qwen35",
    "bailingmoe",
    "tekken",
    "gpt-4o",
    "gpt-2",
    "starcoder",
    "falcon",
    "bloom",
    "viking",
    "deepseek-v3",
    "deepseek-coder",
    "deepseek-llm",
    "kimi-k2",
    "youtu",
    "seed-coder",
    "exaone-moe",
    "jais-2",
    "minicpm5",
)
"""One name of each pre-tokenizer."""
KINDS = {f"byte pairs, {pre}": Kind("bpe", pre) for pre in BPE_PRES} | {
    "SentencePiece": Kind("spm"),
    "SentencePiece, no space before": Kind(
        "spm", None, (("add_space_prefix", False), ("add_bos_token", False))
    ),
}

_TEXT = """the quick brown fox don't I'LL they've we're she'd Naïve café smørrebrød straße
Ω ΣΑΣ привет мир שלום مرحبا 日本語 テスト 한국어 नमस्ते สวัสดี é ñ HTTPServer camelCase
snake_case x1 3.14 12345678 0xFF ½ Ⅷ ٣٤٥ 2024-01-02 $100 50% a+b=c foo(bar)[0]
{"k":1} <b>html</b> http://a.b/c?d=e&f #tag @you ... !? …。，、 ' " ` ~ ^ | \\ / _
-- –— “quotes” ‘x’ ©®™ €£¥ 😀 👩‍👩‍👧 🇩🇪 👍🏽 ﬁ Ǆ ǅ ʰ ˈ def return import class
lambda for in while print"""
_WORDS = tuple(_TEXT.split())
_SPACES = (" ", " ", " ", "", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u3000", "\u00a0", "    ")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<extra>")


def strings(count: int, seed: int) -> list[str]:
    """Return various texts: words of many scripts, digits, punctuation, spaces, sometimes a special token."""
    draw = random.Random(seed)
    fixed = [
        "",
        " ",
        "\n",
        "a",
        "  a",
        "a  ",
        " \n\n a",
        "1234567",
        "ab12cd345",
        "don't",
        "DON'T",
        "aaaaaaaaaaaaaaaa",
        "👩‍👩‍👧",
    ]
    found = fixed[:count]
    while len(found) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            parts += [
                draw.choice(_WORDS) if draw.random() < 0.9 else chr(draw.choice(_RANGES)(draw)),
                draw.choice(_SPACES),
            ]
            if draw.random() < 0.03:
                parts.append(draw.choice(SPECIAL))
        found.append("".join(parts))
    return found


def comparable_strings(kind: Kind, count: int, seed: int) -> list[str]:
    """Return a number of `strings` that are comparable."""
    drawn = count
    while len(found := [text for text in strings(drawn, seed) if is_comparable(kind, text)]) < count:
        drawn *= 2
    return found[:count]


def is_comparable(kind: Kind, text: str) -> bool:
    """Return whether llama.cpp splits a text like the models of the pre-tokenizer, and like Quintet.

    Of GPT-4o's and Tekken's expression, llama.cpp knows only ASCII capitals, and no marks; of Kimi K2's and Youtu's no capitals
    either. In DeepSeek's first expressions, ideographic spaces match none of the named characters.
    """
    if kind.pre in ("kimi-k2", "youtu"):
        return all(each in ascii_lowercase or unicodedata.category(each) not in _CASED for each in text)
    if kind.pre in ("tekken", "gpt-4o"):
        return all(each.isascii() or unicodedata.category(each) not in _CASED for each in text)
    return kind.pre not in ("deepseek-coder", "deepseek-llm") or "\u3000" not in text


_CASED = ("Lu", "Ll", "Lt", "Lm", "Mn", "Mc", "Me")
_RANGES = (
    lambda draw: draw.randint(0x20, 0x7E),
    lambda draw: draw.randint(0xA0, 0x24F),
    lambda draw: draw.randint(0x370, 0x52F),
    lambda draw: draw.randint(0x4E00, 0x4EFF),
    lambda draw: draw.randint(0x1F600, 0x1F64F),
)


def write_file(kind: Kind, target: Path) -> None:
    """Write a file with only a vocabulary."""
    vocabulary = json.loads(VOCABULARIES.read_text())[kind.vocabulary]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_tokenizer_model({"bpe": "gpt2", "spm": "llama"}[kind.vocabulary])
    if kind.pre is not None:
        writer.add_tokenizer_pre(kind.pre)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    for key, value in vocabulary["ids"].items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    for key, flag in kind.flags:
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of_llama_cpp(files: dict[str, Path], texts: Sequence[str]) -> dict[str, Any]:
    """Return, for each file, the ids of the texts, and of the first three with the file's BOS token."""
    arguments = json.dumps([{name: str(file) for name, file in files.items()}, texts])
    done = subprocess.run(
        [LLAMA_CPP, "-c", _LLAMA_CPP_IDS], input=arguments, capture_output=True, text=True, check=True
    )
    ids_by_file: dict[str, Any] = json.loads(done.stdout)
    return ids_by_file


def _trained() -> dict[str, Any]:
    """Train both vocabularies on the strings; words are not split, so that merges cross every possible split."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [text for text in strings(3000, seed=5) if not any(special in text for special in SPECIAL)]
    special = list(SPECIAL)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=900, initial_alphabet=alphabet, show_progress=False, max_token_length=12
        ),
    )
    merges = json.loads(bpe.to_str())["model"]["merges"]
    by_token = bpe.get_vocab()
    vocab = sorted(by_token, key=by_token.__getitem__)
    normal, control, user, unknown, byte = 1, 3, 4, 2, 6
    byte_pairs = {
        "tokens": [*vocab, *special],
        "types": [normal] * len(vocab) + [control, control, user],
        "merges": [" ".join(pair) for pair in merges],
        "ids": {"bos": len(vocab), "eos": len(vocab) + 1},
    }
    unigram = Tokenizer(models.BPE())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    unigram.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=10)
    )
    pieces = json.loads(unigram.to_str())["model"]
    merged = ["".join(pair) for pair in pieces["merges"]]
    ordered = sorted(pieces["vocab"], key=pieces["vocab"].__getitem__)
    characters = ["▁", *(piece for piece in ordered if len(piece) == 1 and piece != "▁")][:180]
    merged = list(dict.fromkeys(merged))
    first = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    tokens = [*first, *merged, *characters, *special]
    scores = (
        [0.0] * len(first)
        + [-float(i) for i in range(len(merged))]
        + [-1e4 - i for i in range(len(characters))]
        + [-1e3] * 3
    )
    types = (
        [unknown, control, control]
        + [byte] * 256
        + [normal] * (len(merged) + len(characters))
        + [control, control, user]
    )
    sentencepiece = {
        "tokens": tokens,
        "types": types,
        "scores": scores,
        "ids": {"bos": 1, "eos": 2, "unknown": 0},
    }
    return {"bpe": byte_pairs, "spm": sentencepiece}


def main() -> None:
    """Train the vocabularies, and record llama.cpp's ids of some strings."""
    VOCABULARIES.write_text(json.dumps(_trained(), ensure_ascii=False, indent=0))
    texts = strings(NUM_EXPECTED, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{index}.gguf" for index, name in enumerate(KINDS)}
        for name, kind in KINDS.items():
            write_file(kind, files[name])
        EXPECTED.write_text(json.dumps(ids_of_llama_cpp(files, texts), separators=(",", ":")))


if __name__ == "__main__":
    main()
