"""``lora_request`` of the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quintet.deploy.embedded import default_model_path
from quintet.deploy.python_api.beams import BeamSearchParams
from quintet.wire.errors import RequestError
from tests.models.lora.random_adapters import RandomAdapter, write_adapter

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The embedded model with one adapter, named "other"."""
    folder = tmp_path_factory.mktemp("adapter") / "other"
    write_adapter(RandomAdapter(("q_proj", "down_proj", "up_proj")), Path(default_model_path()), folder)
    with LLM(lora_modules=[f"other={folder}"], max_model_len=128, max_num_seqs=4, threads=1) as llm:
        yield llm


def test_adapter_of_a_call(llm: LLM) -> None:
    plain = llm.generate([TEXT] * 2, PARAMS, use_tqdm=False)
    changed = llm.generate([TEXT] * 2, PARAMS, lora_request=LoRARequest("other", 1, "unused"), use_tqdm=False)
    assert changed[0].outputs[0].token_ids == changed[1].outputs[0].token_ids != plain[0].outputs[0].token_ids
    again = llm.generate(TEXT, PARAMS, lora_request="other", use_tqdm=False)
    assert again[0].outputs[0].token_ids == changed[0].outputs[0].token_ids
    assert llm.generate(TEXT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_beam_search_and_chat(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    [plain], [changed] = llm.beam_search(TEXT, params), llm.beam_search(TEXT, params, lora_request="other")
    assert plain.sequences[0].score != changed.sequences[0].score
    chat = [{"role": "user", "content": "Hello"}]
    outputs = [
        llm.chat(chat, PARAMS, lora_request=name, use_tqdm=False)[0].outputs[0] for name in (None, "other")
    ]
    assert outputs[0].token_ids != outputs[1].token_ids


def test_unknown_adapter(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"`nope` is not loaded; loaded are: `other`.*lora_modules=\['nope=PATH'\]"
    ):
        llm.generate(TEXT, PARAMS, lora_request="nope", use_tqdm=False)


def test_structured_output(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["xylophone", "zebra"])
    )
    [output] = llm.generate(TEXT, params, lora_request="other", use_tqdm=False)
    assert output.outputs[0].text in ("xylophone", "zebra")
