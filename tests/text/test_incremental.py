"""Decoding one token at a time equals the tokenizer's decode of all ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import quintet.deploy
from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.vocabulary import Vocabulary, byte_of

TEXTS = [
    "",
    " leading and  double spaces ",
    "naïve 😀😃 👩‍👩‍👧 🇩🇪 日本語 e\u0301 \u200b",
    "line\n\n\tindented\r\n",
    "Hello world, don't <|im_end|> stop </s> <with space> é! hello.",
    "\ufffd replacement \x00 control",
]


def pushed(table: PieceTable, ids: Sequence[int], context: Sequence[int] = ()) -> str:
    """Decode like the row loop: by table while clean, by push otherwise."""
    decoder = table.decoder(context)
    parts = []
    for token_id in ids:
        piece = table.pieces[token_id] if decoder.clean else None
        parts.append(decoder.push(token_id) if piece is None else piece)
    return "".join(parts) + decoder.flush()


def check(tokenizer: Tokenizer, tables: dict[bool, PieceTable], ids: list[int]) -> None:
    for skip, table in tables.items():
        assert pushed(table, ids) == tokenizer.decode(ids, skip_special_tokens=skip), (skip, ids)


def tables_of(tokenizer: Tokenizer) -> dict[bool, PieceTable]:
    """Return both tables, keyed by ``skip_special_tokens``."""
    showing = PieceTable(Vocabulary.of(tokenizer))
    return {True: showing.skipping_special_tokens(), False: showing}


@pytest.fixture(scope="session")
def tables(any_tokenizer: Tokenizer) -> dict[bool, PieceTable]:
    return tables_of(any_tokenizer)


def test_each_style_is_detected(tokenizers_by_style: dict[str, Tokenizer]) -> None:
    kinds = {name: Vocabulary.of(tokenizer).decoder.kind for name, tokenizer in tokenizers_by_style.items()}
    assert kinds == {
        "byte_level": "bytes",
        "sentencepiece": "pieces",
        "metaspace": "metaspace",
        "wordpiece": "library",
    }


@pytest.mark.parametrize("text", TEXTS)
def test_texts_decode_like_the_library(
    any_tokenizer: Tokenizer, tables: dict[bool, PieceTable], text: str
) -> None:
    check(any_tokenizer, tables, any_tokenizer.encode(text).ids)


def test_random_ids_decode_like_the_library(any_tokenizer: Tokenizer, tables: dict[bool, PieceTable]) -> None:
    """Ids of the whole vocabulary, with many byte tokens and specials, which have state."""
    rng = random.Random(7)
    every = range(tables[True].num_ids)
    stateful = [i for i in every if tables[False].pieces[i] is None or i in tables[True].absent]
    for _ in range(3000):
        source = rng.choice((every, stateful or every))
        ids = [rng.choice(source if rng.random() < 0.8 else every) for _ in range(rng.randrange(14))]
        check(any_tokenizer, tables, ids)


def test_every_single_id_decodes_like_the_library(
    any_tokenizer: Tokenizer, tables: dict[bool, PieceTable]
) -> None:
    for token_id in range(tables[True].num_ids):
        check(any_tokenizer, tables, [token_id])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_any_text_decodes_like_the_library(
    any_tokenizer: Tokenizer, tables: dict[bool, PieceTable], text: str
) -> None:
    check(any_tokenizer, tables, any_tokenizer.encode(text).ids)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(raw=st.binary(max_size=24))
def test_any_bytes_decode_like_the_library(tokenizers_by_style: dict[str, Tokenizer], raw: bytes) -> None:
    """Arbitrary bytes, also invalid UTF-8, as byte tokens of both styles."""
    for style in ("byte_level", "sentencepiece"):
        tokenizer = tokenizers_by_style[style]
        table = PieceTable(Vocabulary.of(tokenizer)).skipping_special_tokens()
        token_of = {
            table.raw[i]: i for i in range(table.num_ids) if style == "byte_level" or table.is_byte[i]
        }
        ids = [token_of[bytes([byte])] for byte in raw]
        assert pushed(table, ids) == tokenizer.decode(ids)


def test_output_continues_the_prompt(any_tokenizer: Tokenizer, tables: dict[bool, PieceTable]) -> None:
    """The text of an output is the part it adds to the prompt's text, for any split between characters."""
    for text in ("hello world, the he do wor", "a 世 b, he the hello"):
        ids = any_tokenizer.encode(text, add_special_tokens=False).ids
        whole = any_tokenizer.decode(ids)
        for split in range(len(ids) + 1):
            before = any_tokenizer.decode(ids[:split])
            if not whole.startswith(before):
                continue  # inside a character
            for context in {tuple(ids[:split]), tuple(ids[max(0, split - 16) : split])}:
                decoder = tables[True].decoder(context, whole=len(context) == split)
                after = "".join(map(decoder.push, ids[split:])) + decoder.flush()
                assert before + after == whole, (split, context)


def test_a_character_split_between_prompt_and_output_belongs_to_the_output(
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    for style in ("byte_level", "sentencepiece"):
        table = PieceTable(Vocabulary.of(tokenizers_by_style[style])).skipping_special_tokens()
        token_of = {
            table.raw[i]: i for i in range(table.num_ids) if style == "byte_level" or table.is_byte[i]
        }
        ids = [token_of[bytes([byte])] for byte in "😀é".encode()]
        assert pushed(table, ids[2:], ids[:2]) == "😀é"
        assert pushed(table, ids[4:], ids[:4]) == "é"
        tail = table.decoder(ids[2:4], whole=False)  # the tail begins inside a character
        assert tail.push(ids[4]) + tail.push(ids[5]) + tail.flush() == "é"


def test_ids_beyond_the_tokenizer_are_empty_text(any_tokenizer: Tokenizer) -> None:
    size = any_tokenizer.get_vocab_size()
    table = PieceTable(Vocabulary.of(any_tokenizer, size + 50)).skipping_special_tokens()
    assert table.num_ids == size + 50
    assert pushed(table, [size + 10, size + 49]) == ""


def test_state_is_bounded(any_tokenizer: Tokenizer, tables: dict[bool, PieceTable]) -> None:
    """Also after a long run of byte tokens or of hidden special tokens."""
    table = tables[True]
    for token_id in (min(table.absent), next(i for i in range(table.num_ids) if i not in table.absent)):
        decoder = table.decoder()
        for _ in range(20_000):
            decoder.push(token_id)
        held = getattr(decoder, "_ids", None) or getattr(decoder, "_pending", b"")
        assert len(held) < 8


def test_byte_tokens_are_parsed_like_in_the_library() -> None:
    assert [byte_of(token) for token in ("<0x0A>", "<0xff>", "<0xGG>", "<0x1>", "<0x123>", "0x0A")] == [
        10, 255, None, None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("_", " ")]),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Replace("_", ""),
        None,
    ],
)
def test_other_decoders_decode_like_the_library(decoder: decoders.Decoder | None) -> None:
    words = ["a", "_b", "__", "_", "c</w>", "▁d", "▁▁", "<0x41>", "<0xE4>", "<0xB8>", "<0x96>", "<|s|>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<|s|>"])
    tables = tables_of(tokenizer)
    rng = random.Random(3)
    for _ in range(600):
        check(tokenizer, tables, [rng.randrange(len(words)) for _ in range(rng.randrange(9))])


EMBEDDED = sorted((Path(quintet.deploy.__path__[0]) / "embedded").rglob("tokenizer.json"))


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda path: path.parent.name)
def test_embedded_tokenizers_decode_like_the_library(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    tables = tables_of(tokenizer)
    rng = random.Random(11)
    for text in TEXTS:
        check(tokenizer, tables, tokenizer.encode(text).ids)
    for _ in range(1000):
        check(tokenizer, tables, [rng.randrange(tables[True].num_ids) for _ in range(rng.randrange(20))])
