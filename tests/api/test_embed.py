"""``LLM.embed``: vectors of prompts, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from quintet import LLM
from quintet.wire.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The embedded model, which pools."""
    with LLM(runner="pooling", max_model_len=128, max_num_seqs=4, threads=1) as llm:
        yield llm


def test_vectors_in_order(llm: LLM) -> None:
    texts = [f"Once upon a time {i}" for i in range(20)]
    together = llm.embed(texts, use_tqdm=False)
    assert [each.outputs.embedding for each in together[:3]] == [
        llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in texts[:3]
    ]
    assert len({tuple(each.outputs.embedding) for each in together}) == len(texts)
    assert all(math.hypot(*each.outputs.embedding) == pytest.approx(1) for each in together)


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.encode("Once upon a time")
    [text], [of_ids] = (llm.embed(each, use_tqdm=False) for each in ("Once upon a time", ids))
    assert text.outputs.embedding == of_ids.outputs.embedding
    assert text.num_prompt_tokens == of_ids.num_prompt_tokens == len(ids)
    assert llm.embed([], use_tqdm=False) == []


def test_long_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="128"):
        llm.embed(["short", [5] * 129], use_tqdm=False)
    [cut] = llm.embed([[5] * 129], truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.num_prompt_tokens == 128
    [whole] = llm.embed([[5] * 128], use_tqdm=False)
    assert cut.outputs.embedding == whole.outputs.embedding


def test_generation_beside_it(llm: LLM) -> None:
    assert llm.generate("Once upon a time", use_tqdm=False)[0].outputs[0].text


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.embed(["a", "b"])
    assert "2/2" in capsys.readouterr().err
