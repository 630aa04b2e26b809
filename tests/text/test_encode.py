"""Encoding of prompts: truncation, limits, errors, bad words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.tokenizer_proc.encode import Encoder, load_encoder
from quintet.wire.chat import encode_messages
from quintet.wire.codec import pack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams

TEXT = "hello world, the quick dog"


@pytest.fixture
def encoder_of(model_of: Callable[..., ModelConfig]) -> Callable[..., Encoder]:
    def make(tokenizer: Tokenizer, max_model_len: int = 100) -> Encoder:
        templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
        return Encoder(tokenizer, templates, model_of(tokenizer, max_model_len))

    return make


@pytest.fixture
def encoder(encoder_of: Callable[..., Encoder], tokenizers_by_style: dict[str, Tokenizer]) -> Encoder:
    return encoder_of(tokenizers_by_style["sentencepiece"])


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1} | changes))


def refused(encoder: Encoder, prompt: Any, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        encoder.prompt_ids(prompt, params(**changes))
    return caught.value


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_come_from_the_tokenizer(
    encoder: Encoder, tokenizers_by_style: dict[str, Tokenizer], special: bool
) -> None:
    expected = tokenizers_by_style["sentencepiece"].encode(TEXT, add_special_tokens=special).ids
    assert encoder.prompt_ids(TextPrompt(TEXT, special), params()) == expected
    assert (expected[0] == 1) is special


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-4, None)), ("right", slice(1, 5))])
def test_truncation_keeps_the_special_tokens(
    encoder: Encoder, tokenizers_by_style: dict[str, Tokenizer], side: str, kept: slice
) -> None:
    whole = tokenizers_by_style["sentencepiece"].encode(TEXT).ids
    ids = encoder.prompt_ids(TextPrompt(TEXT), params(truncate_prompt_tokens=5, truncation_side=side))
    assert ids == [1, *whole[kept]]


def test_truncation_of_ids(encoder: Encoder) -> None:
    prompt = TokenPrompt(pack_i32(range(10)))
    assert list(encoder.prompt_ids(prompt, params(truncate_prompt_tokens=3))) == [7, 8, 9]
    right = params(truncate_prompt_tokens=3, truncation_side="right")
    assert list(encoder.prompt_ids(prompt, right)) == [0, 1, 2]


def test_minus_one_truncates_to_the_context_length(encoder: Encoder) -> None:
    prompt = TokenPrompt(pack_i32([5] * 500))
    assert len(encoder.prompt_ids(prompt, params(truncate_prompt_tokens=-1, max_tokens=30))) == 70
    assert len(encoder.prompt_ids(prompt, params(truncate_prompt_tokens=-1, max_tokens=None))) == 99


def test_truncating_to_more_than_the_context_length_is_refused(encoder: Encoder) -> None:
    error = refused(encoder, TextPrompt(TEXT), truncate_prompt_tokens=101)
    assert (error.code, error.param) == (ErrorCode.INVALID, "truncate_prompt_tokens")
    assert "101" in error.message and "100" in error.message


def test_a_prompt_that_fills_the_context_is_too_long(encoder: Encoder) -> None:
    assert len(encoder.prompt_ids(TokenPrompt(pack_i32([5] * 99)), params(max_tokens=None))) == 99
    error = refused(encoder, TokenPrompt(pack_i32([5] * 100)), max_tokens=None)
    assert (error.code, error.param) == (ErrorCode.TOO_LONG, "prompt")
    assert error.message.startswith(
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens (100 in the prompt"
    )


def test_prompt_and_output_together_must_fit(encoder: Encoder) -> None:
    chat = ChatPrompt(encode_messages([{"role": "user", "content": "he"}]))
    assert encoder.prompt_ids(chat, params(max_tokens=99))
    error = refused(encoder, chat, max_tokens=100)
    assert (error.code, error.param) == (ErrorCode.TOO_LONG, "max_tokens")
    assert "you requested 101 tokens (1 in the messages, 100 in the completion)" in error.message


def test_a_default_max_tokens_is_reduced_to_fit_the_prompt(encoder: Encoder) -> None:
    """Only a ``max_tokens`` sent by the client is refused."""
    prompt = TokenPrompt(pack_i32([5] * 90))
    for max_tokens in (11, 99, 1 << 20):
        error = refused(encoder, prompt, max_tokens=max_tokens)
        assert (error.code, error.param) == (ErrorCode.TOO_LONG, "max_tokens")
        assert len(encoder.prompt_ids(prompt, params(max_tokens=max_tokens), clamp_max_tokens=True)) == 90
    with pytest.raises(RequestError, match="100 in the prompt"):
        encoder.prompt_ids(TokenPrompt(pack_i32([5] * 100)), params(max_tokens=11), clamp_max_tokens=True)


@pytest.mark.parametrize(("default", "kept"), [(16, 84), (50, 50), (51, 99), (1 << 20, 99)])
def test_truncation_reserves_up_to_half_the_context_for_a_default_max_tokens(
    encoder: Encoder, default: int, kept: int
) -> None:
    default_params = params(truncate_prompt_tokens=-1, max_tokens=default)
    prompt = TokenPrompt(pack_i32([5] * 500))
    assert len(encoder.prompt_ids(prompt, default_params, clamp_max_tokens=True)) == kept


def test_a_text_too_long_to_fit_is_refused_before_encoding(
    encoder: Encoder, tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    error = refused(encoder, TextPrompt("x" * 1_000_000))
    assert (error.code, error.param) == (ErrorCode.TOO_LONG, "prompt")
    assert "at least" in error.message


@pytest.mark.parametrize("text", ["x" * 1_000_000, "he " * 120])
def test_a_pooled_text_that_is_too_long_has_no_output(encoder: Encoder, text: str) -> None:
    """Both before encoding and after it."""
    with pytest.raises(RequestError, match="0 in the completion"):
        encoder.prompt_ids(TextPrompt(text), params(), is_pooled=True)


def test_texts_that_a_normalizer_shrinks_are_encoded_first(
    encoder_of: Callable[..., Encoder], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = Tokenizer.from_str(tokenizers_by_style["byte_level"].to_str())
    tokenizer.normalizer = normalizers.Strip()
    assert encoder_of(tokenizer).prompt_ids(TextPrompt(" " * 1_000_000 + "hello"), params())


def test_empty_prompts_are_invalid(encoder: Encoder) -> None:
    for prompt in (TokenPrompt(b""), TextPrompt("", False)):
        error = refused(encoder, prompt)
        assert (error.code, error.param) == (ErrorCode.INVALID, "prompt")
        assert "empty" in error.message


@pytest.mark.parametrize("token_id", [-1, 10_000])
def test_the_error_names_ids_outside_the_vocabulary(
    encoder: Encoder, tokenizers_by_style: dict[str, Tokenizer], token_id: int
) -> None:
    error = refused(encoder, TokenPrompt(pack_i32([1, token_id])))
    assert error.code is ErrorCode.INVALID
    limit = tokenizers_by_style["sentencepiece"].get_vocab_size() - 1
    assert f"token id {token_id} " in error.message and f"between 0 and {limit}" in error.message


@pytest.fixture
def encoder_of_larger_tokenizer(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> Encoder:
    """Encoder of a tokenizer with one more token than the model."""
    tokenizer = Tokenizer.from_str(tokenizers_by_style["byte_level"].to_str())
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["[PAD]"])
    templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    return Encoder(tokenizer, templates, model_of(tokenizer, 100, vocab_size=size))


def test_the_error_names_a_token_outside_the_models_vocabulary(encoder_of_larger_tokenizer: Encoder) -> None:
    size = encoder_of_larger_tokenizer._vocab_size
    chat = ChatPrompt(encode_messages([{"role": "user", "content": "a [PAD] b"}]))
    kept = {"truncate_prompt_tokens": 50}
    for prompt, changes in ((TextPrompt("a [PAD] b"), {}), (chat, {}), (TextPrompt("[PAD]"), kept)):
        error = refused(encoder_of_larger_tokenizer, prompt, **changes)
        assert (error.code, error.param) == (
            ErrorCode.INVALID,
            "messages" if prompt is chat else "prompt",
        )
        assert f"token id {size} ('[PAD]')" in error.message and f"has {size} tokens" in error.message
    assert encoder_of_larger_tokenizer.prompt_ids(TextPrompt("a b"), params())


def test_the_error_names_a_bad_word_outside_the_models_vocabulary(
    encoder_of_larger_tokenizer: Encoder,
) -> None:
    with pytest.raises(RequestError, match=r"bad_words holds the token id \d+ \('\[PAD\]'\)") as caught:
        encoder_of_larger_tokenizer.bad_word_ids(["hello", "[PAD]"])
    assert caught.value.param == "bad_words"


def test_a_partial_id_is_invalid(encoder: Encoder) -> None:
    assert refused(encoder, TokenPrompt(b"\x01\x00\x00")).code is ErrorCode.INVALID


def test_text_that_is_not_unicode_is_invalid(encoder: Encoder) -> None:
    assert refused(encoder, TextPrompt("\ud800")).code is ErrorCode.INVALID


def test_bad_words_with_and_without_a_space(
    encoder_of: Callable[..., Encoder], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_style["byte_level"]
    encoder = encoder_of(tokenizer)
    for word in ("fox", " 🦩", "the", "zzz"):
        bare, *spaced = encoder.bad_word_ids([word])
        assert tokenizer.decode(bare) == word.strip()
        for ids in spaced:
            assert tokenizer.decode(ids) == " " + word.strip()
            assert len(ids) == len(bare) and ids[0] != bare[0]
    assert len(encoder.bad_word_ids(["zzz"])) == 1  # its form with a space only adds the space token
    assert len(encoder.bad_word_ids(["the"])) == 2  # one token each
    with pytest.raises(RequestError, match="' '"):
        encoder.bad_word_ids([" "])


def test_the_error_names_unreadable_files(model_of: Callable[..., ModelConfig], tmp_path: Path) -> None:
    model = model_of(Tokenizer.from_str('{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}'))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_encoder(model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_encoder(model)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"does not exist"):
        load_encoder(model)
