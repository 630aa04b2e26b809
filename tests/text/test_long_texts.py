"""Texts encoded in chunks have the ids of the whole text; tokenizers that do not allow it encode the whole."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from quintet.deploy.embedded import default_model_path
from quintet.tokenizer_proc import encode, long_texts
from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.encode import Encoder
from quintet.tokenizer_proc.long_texts import APART, EXPRESSIONS, SPACE, Cutter, cutter_of, encoded
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError

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
    tokenizer.train_from_iterator([written(seed) + text_of_runs(seed) for seed in range(20)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def written(seed: int, num_words: int = 400) -> str:
    draw = random.Random(seed)
    words = [draw.choice([*ODDS, "word", "mouse", "Other", "house"]) for _ in range(num_words)]
    return "".join(word + draw.choice(["", " ", " ", "\n"]) for word in words)


def split_by(*expressions: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(words), "isolated") for words in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def of_sentencepiece(
    normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None
) -> Tokenizer:
    """Return a tokenizer trained word by word, then given another normalizer and splitter."""
    tokenizer = trained(pre_tokenizers.Metaspace(prepend_scheme="never"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    return tokenizer


SPACES = normalizers.Replace(" ", SPACE)
GPT2, LLAMA3, QWEN, GPT_OSS, TEKKEN, DEEPSEEK = EXPRESSIONS
KINDS = {
    "ours": lambda: Tokenizer.from_file(f"{default_model_path()}/tokenizer.json"),
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: trained(split_by(LLAMA3)),
    "qwen": lambda: trained(split_by(QWEN), normalizers.NFC()),
    "gpt-oss": lambda: trained(split_by(GPT_OSS)),
    "tekken": lambda: trained(split_by(TEKKEN)),
    "deepseek": lambda: trained(split_by(*APART, DEEPSEEK)),
    "llama2": lambda: of_sentencepiece(normalizers.Sequence([normalizers.Prepend(SPACE), SPACES]), None),
    "gemma": lambda: of_sentencepiece(SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: of_sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "words": lambda: of_sentencepiece(None, pre_tokenizers.Metaspace()),
}
WITH_WORDS = [kind for kind in KINDS if kind not in {"llama2", "gemma", "metaspace", "words"}]
ALPHABETS = [
    "ab",
    "abcdefgh",
    "AB",
    "aB",
    "!a",
    "a\u00e9",
    "\u4e2d\u6587\u5b57",
    "\u4e2d\u3042\uac00",
    "\u4e2d\u30fc",
    "0123456789",
    "7\u0663",
    ".,!",
    "'s",
    "\U0001f642\U0001f680",
    "\U0001f642\u200d\ufe0f",
    "e\u0301\u0323",
    "\u1112\u1161\u11ab",
    " ",
    " \n",
    "\n",
    "\r\n\t",
    "\u0e01\u0e31",
    "\u00e9\u00df",
    "/\n",
]


def text_of_runs(seed: int, longest: int = 90) -> str:
    draw = random.Random(seed)
    word_cuts = []
    for _ in range(draw.randint(1, 12)):
        alphabet = draw.choice(ALPHABETS)
        word_cuts.append("".join(draw.choices(alphabet, k=draw.randint(1, longest))))
    return draw.choice(["", "<s>", " ", "</s>"]).join(word_cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_ids_of_the_whole_text(
    kind: str, model_of: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]()
    cutter = cutter_of(tokenizer)
    assert cutter is not None
    ids_of = Cutter.ids_of
    encoder = Encoder(tokenizer, ChatTemplates({}, {}), model_of(tokenizer))
    texts = [written(seed) for seed in range(100, 108)]
    for special in (False, True):
        whole = [list(encoder.encode_long(text, special)) for text in texts]
        for size in (7, 50):
            monkeypatch.setattr(encode, "CHUNK_CHARS", size)
            monkeypatch.setattr(
                Cutter, "ids_of", lambda self, text, most, size=size: ids_of(self, text, most, size)
            )
            assert [list(encoder.encode_long(text, special)) for text in texts] == whole
            monkeypatch.undo()


@pytest.mark.parametrize("kind", WITH_WORDS)
def test_a_text_of_runs_has_the_ids_of_the_whole_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = KINDS[kind]()
    cutter = cutter_of(tokenizer)
    assert cutter is not None
    for seed in range(2000 if request.config.getoption("--whole") else 150):
        text = text_of_runs(seed)
        assert list(cutter.ids_of(text, None, 12)) == encoded(tokenizer, text), (seed, text)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_bounded_in_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cutter = cutter_of(KINDS[kind]())
    assert cutter is not None
    text, sizes = "some words of a text " * 1000, []

    def measured(tokenizer: Tokenizer, text: str) -> list[int]:
        sizes.append(len(text))
        return encoded(tokenizer, text)

    monkeypatch.setattr(long_texts, "encoded", measured)
    assert list(cutter.ids_of(text, None, 1000)) == encoded(cutter.tokenizer, text)
    assert len(sizes) > 20 and max(sizes) < 1100


@pytest.mark.parametrize("unit", ["a", ".", " ", "\u4e2d\u6587", "\U0001f642"])
def test_a_run_that_cannot_be_cut_is_rejected(unit: str) -> None:
    cutter = cutter_of(KINDS["llama3"]())
    assert cutter is not None
    cutter = replace(cutter, max_chars=5000)
    with pytest.raises(RequestError, match="more than 5000 characters"):
        cutter.ids_of("word " * 1000 + unit * 40_000, None, 1000)
    text = "a " * 2000 + unit * 2000 + " a" * 2000
    assert list(cutter.ids_of(text, None, 1000)) == encoded(cutter.tokenizer, text)


def test_encoding_ends_after_the_requested_number_of_ids() -> None:
    cutter = cutter_of(KINDS["llama3"]())
    assert cutter is not None
    text = "some words of a text " * 5000
    ids, whole = cutter.ids_of(text, 100, 1000), encoded(cutter.tokenizer, text)
    assert 100 < len(ids) < 1000 and list(ids) == whole[: len(ids)]


def test_tokenizers_without_cutter() -> None:
    assert not cutter_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=True)))
    assert not cutter_of(trained(split_by(r"\p{L}+ \p{L}+|\s+")))
    assert not cutter_of(trained(pre_tokenizers.Metaspace(split=False))), "its tokens span words"
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), (SPACE, -1.0), ("a", -1.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    assert not cutter_of(unigram)
    doubled = normalizers.Sequence([SPACES, normalizers.Replace("a", "b")])
    assert not cutter_of(of_sentencepiece(doubled, None))
    assert not cutter_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("▁")))
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert not cutter_of(tokenizer)


@pytest.mark.parametrize("added", ["two words", "<|end 1|>", "aaaa", "zz\u0301z", "12", "  "])
def test_added_tokens_are_not_cut(added: str) -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken(added, special=True), AddedToken("of", single_word=True)])
    cutter = cutter_of(tokenizer)
    assert cutter is not None
    draw = random.Random(1)
    for _ in range(30):
        text = "".join(
            draw.choice([added, added[:2], "words", " of ", "aaaaaaaaaaaaaaaaaaaa"]) for _ in range(60)
        )
        assert list(cutter.ids_of(text, None, 60)) == encoded(tokenizer, text)


def test_the_ids_of_a_long_text_take_four_bytes_each(model_of: Callable[..., ModelConfig]) -> None:
    """A list of ints would take 40 bytes each. The array over-allocates by an eighth."""
    tokenizer = KINDS["gpt2"]()
    encoder = Encoder(tokenizer, ChatTemplates({}, {}), model_of(tokenizer))
    text = "the quick brown fox " * (2 * encode.CHUNK_CHARS // 20 + 1)
    tracemalloc.start()
    try:
        ids = encoder.encode_long(text, False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ids) > encode.CHUNK_CHARS // 4
    assert held < 5 * len(ids) + (64 << 10)
