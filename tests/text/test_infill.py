"""``suffix``: prompts in the infill format of each family, spaces added by tokenizers, and unsupported models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer

from quintet.tokenizer_proc.encode import Encoder
from quintet.tokenizer_proc.infill import ENDS, FORMATS, Infill, InfillPart, open_infill
from quintet.tokenizer_proc.template_files import load_templates
from quintet.wire.config import ModelConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import TextPrompt
from quintet.wire.params import SamplingParams

PREFIX, SUFFIX = "def f():\n    return ", "\n\nprint(f())"


def marked(tokenizer: Tokenizer, layout: tuple[str | InfillPart, ...]) -> Tokenizer:
    found = Tokenizer.from_str(tokenizer.to_str())
    found.add_special_tokens([AddedToken(mark, normalized=False) for mark in layout if isinstance(mark, str)])
    return found


def opened(tokenizer: Tokenizer) -> Infill:
    infill = open_infill(tokenizer, tokenizer.get_vocab_size(), [2])
    assert infill is not None
    return infill


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: str(layout[0]))
def test_a_prompt_has_the_infill_format_of_its_model(
    layout: tuple[str | InfillPart, ...], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = marked(tokenizers_by_style["byte_level"], layout)
    ids = opened(tokenizer).ids(PREFIX, SUFFIX, add_special_tokens=False)
    texts = {InfillPart.PREFIX: PREFIX, InfillPart.SUFFIX: SUFFIX}
    written = "".join(part if isinstance(part, str) else texts[part] for part in layout)
    assert tokenizer.decode(ids, skip_special_tokens=False) == written
    assert ids == tokenizer.encode(written, add_special_tokens=False).ids
    marks = {tokenizer.token_to_id(part) for part in layout if isinstance(part, str)}
    assert marks <= set(opened(tokenizer).end_ids)


def test_an_end_of_file_token_ends_an_infill(tokenizers_by_style: dict[str, Tokenizer]) -> None:
    tokenizer = marked(tokenizers_by_style["byte_level"], (*FORMATS[0], ENDS[0]))
    assert tokenizer.token_to_id(ENDS[0]) in opened(tokenizer).end_ids
    eos = [tokenizer.token_to_id(ENDS[0])]
    infill = open_infill(tokenizer, tokenizer.get_vocab_size(), eos)
    assert infill is not None and not set(eos) & set(infill.end_ids)


def test_no_space_is_added_before_a_suffix(tokenizers_by_style: dict[str, Tokenizer]) -> None:
    """Tokenizers that prepend a space to every text prepend it once, before the prompt."""
    name = next(
        name
        for name, each in tokenizers_by_style.items()
        if each.encode("a", add_special_tokens=False).tokens[0].startswith("▁")
    )
    tokenizer = marked(tokenizers_by_style[name], FORMATS[4])
    infill = opened(tokenizer)
    ids = infill.ids("hello", "world", add_special_tokens=True)
    middle, pre = tokenizer.token_to_id("▁<SUF>"), tokenizer.token_to_id("▁<PRE>")
    suffix = ids[ids.index(middle) + 1 : -1]
    assert not tokenizer.id_to_token(suffix[0]).startswith("▁")
    assert "".join(tokenizer.id_to_token(each) for each in suffix) == "world"
    whole = tokenizer.encode("hello", add_special_tokens=True).ids
    assert ids[: ids.index(pre)] == whole[: ids.index(pre)]
    assert tokenizer.id_to_token(ids[ids.index(pre) + 1]).startswith("▁")


def test_a_model_without_infill_tokens_is_refused(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_style["byte_level"]
    model = model_of(tokenizer)
    encoder = Encoder(tokenizer, load_templates(model), model)
    with pytest.raises(RequestError, match="no fill-in-the-middle tokens"):
        encoder.prompt_ids(TextPrompt("a", suffix="b"), SamplingParams())
    infill_tokenizer = marked(tokenizer, FORMATS[1])
    model = model_of(infill_tokenizer)
    encoder = Encoder(infill_tokenizer, load_templates(model), model)
    ids = encoder.prompt_ids(TextPrompt("a", suffix="b"), SamplingParams())
    assert (
        infill_tokenizer.decode(list(ids), skip_special_tokens=False)
        == "<fim_prefix>a<fim_suffix>b<fim_middle>"
    )
    assert encoder.ends_of(TextPrompt("a")) == []
    assert infill_tokenizer.token_to_id("<fim_middle>") in encoder.ends_of(TextPrompt("a", suffix="b"))
