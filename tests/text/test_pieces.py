"""Texts in pieces have the ids of the whole, with every kind of expression that is cut at; others are left whole."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from quintet.deploy.embedded import default_model_path
from quintet.tokenizer_proc import encode
from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.encode import Encoder
from quintet.tokenizer_proc.pieces import SPACE, Cutter, cutter_of
from quintet.wire.config import ModelConfig

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ODDS = [
    "the",
    "a",
    "I'll",
    "it's",
    "don't",
    "é",
    "e\u0301",
    "中文",
    "0123",
    "...",
    "\n",
    "\r\n",
    " ",
    "  ",
    "\t",
    "x\u0301y",
    "<s>",
    "🙂",
    "==",
]


def trained(
    splitter: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([written(seed) for seed in range(20)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def written(seed: int, num_words: int = 400) -> str:
    draw = random.Random(seed)
    words = [draw.choice([*ODDS, "word", "mouse", "Other", "house"]) for _ in range(num_words)]
    return "".join(word + draw.choice(["", " ", " ", "\n"]) for word in words)


def split_by(words: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def of_sentencepiece(
    normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None
) -> Tokenizer:
    """Return a tokenizer whose vocabulary was learnt word by word, and that then sees texts otherwise."""
    tokenizer = trained(pre_tokenizers.Metaspace(prepend_scheme="never"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    return tokenizer


SPACES = normalizers.Replace(" ", SPACE)
KINDS = {
    "ours": lambda: Tokenizer.from_file(f"{default_model_path()}/tokenizer.json"),
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "cl100k": lambda: trained(split_by(CL100K)),
    "qwen": lambda: trained(split_by(CL100K.replace("{1,3}", "")), normalizers.NFC()),
    "llama2": lambda: of_sentencepiece(normalizers.Sequence([normalizers.Prepend(SPACE), SPACES]), None),
    "gemma": lambda: of_sentencepiece(SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: of_sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "words": lambda: of_sentencepiece(None, pre_tokenizers.Metaspace()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole(
    kind: str, model_of: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]()
    cutter = cutter_of(tokenizer)
    assert cutter is not None
    pieces_of = Cutter.pieces_of
    encoder = Encoder(tokenizer, ChatTemplates({}, {}), model_of(tokenizer))
    texts = [written(seed) for seed in range(100, 130)]
    for special in (False, True):
        whole = [list(encoder.encode_long(text, special)) for text in texts]
        for size in (1, 7, 50):
            monkeypatch.setattr(encode, "PIECE_CHARS", size)
            monkeypatch.setattr(
                Cutter, "pieces_of", lambda self, text, size=size: pieces_of(self, text, size)
            )
            assert [list(encoder.encode_long(text, special)) for text in texts] == whole
            monkeypatch.undo()


def test_what_may_not_be_cut() -> None:
    assert not cutter_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not cutter_of(trained(split_by(r"\p{L}+ \p{L}+|\s+")))
    assert not cutter_of(trained(pre_tokenizers.Metaspace(split=False))), "it learnt tokens across words"
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), (SPACE, -1.0), ("a", -1.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    assert not cutter_of(unigram)
    doubled = normalizers.Sequence([SPACES, normalizers.Replace("a", "b")])
    assert not cutter_of(of_sentencepiece(doubled, None))
    assert not cutter_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("▁")))
    for added in (AddedToken("<mask>", lstrip=True), AddedToken("two words")):
        tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.add_tokens([added])
        assert not cutter_of(tokenizer)


def test_pieces() -> None:
    text = "one two three\nfour é five, six " * 50
    cutter = Cutter(drops_space=False)
    assert "".join(cutter.pieces_of(text, 20)) == text
    assert max(map(len, cutter.pieces_of(text, 20))) < 60
    assert list(cutter.pieces_of("x" * 100, 20)) == ["x" * 100]
    assert list(cutter.pieces_of("", 20)) == [""]
    assert " ".join(Cutter(drops_space=True).pieces_of(text, 20)) == text


def test_the_ids_of_a_long_text_take_four_bytes_each(model_of: Callable[..., ModelConfig]) -> None:
    """As Python's numbers in a list they would take 40 (the column grows by an eighth more than it needs)."""
    tokenizer = KINDS["gpt2"]()
    encoder = Encoder(tokenizer, ChatTemplates({}, {}), model_of(tokenizer))
    text = "the quick brown fox " * (2 * encode.PIECE_CHARS // 20 + 1)
    tracemalloc.start()
    try:
        ids = encoder.encode_long(text, False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ids) > encode.PIECE_CHARS // 4
    assert held < 5 * len(ids) + (64 << 10)
