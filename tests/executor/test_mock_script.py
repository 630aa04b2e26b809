"""Scripted outputs of the mock worker, resumed after any number of outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.executor.conftest import Drawer, plan_of
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from quintet.executor.mock import NO_ANSWER, MockWorker, read_mock_script
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ConfigError
from quintet.wire.params import SamplingParams

TOKENIZER_FILE = default_model_path() / "tokenizer.json"
END_ID = 2
ROWS = [
    {
        "after": "rain?",
        "say": "<think>\nI look.\n</think>\nI call the weather service for the city of Zürich.",
    },
    {"after": "wet", "say": "Take an umbrella."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_FILE))


@pytest.fixture
def worker(tmp_path: Path) -> MockWorker:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(ROWS))
    script = read_mock_script(path, TOKENIZER_FILE, END_ID)
    return MockWorker(4, 4096, [END_ID], num_blocks=10, step_s=0.0, script=script)


def answer(worker: MockWorker, prompt: list[int], outputs: list[int]) -> list[int]:
    """Draw until the end token, for a request that enters with outputs."""
    outputs = [*outputs]
    while END_ID not in outputs:
        drawer = Drawer(SamplingParams(), prompt=prompt, outputs=outputs)
        outputs += list(unpack_i32(worker.execute(plan_of([drawer], [1])).token_ids))
    return outputs


@pytest.mark.parametrize(
    ("prompt", "answer_text"),
    [
        ("Will there be rain? <|im_end|>", ROWS[0]["say"]),
        ("rain? It is wet. And now?", ROWS[1]["say"]),
        ("It is wet. Will there be rain?", ROWS[0]["say"]),
        ("rain? I call the weather service for the city of Zürich. dry.", NO_ANSWER),
        ("snow?", NO_ANSWER),
    ],
)
def test_the_row_of_the_last_match_answers_once(
    worker: MockWorker, tokenizer: Tokenizer, prompt: str, answer_text: str
) -> None:
    ids = answer(worker, tokenizer.encode(prompt).ids, [])
    assert ids == [*tokenizer.encode(answer_text).ids, END_ID]


def test_a_request_with_outputs_continues_after_them(worker: MockWorker, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("rain?").ids
    whole = answer(worker, prompt, [])
    assert answer(worker, prompt, whole[:5]) == whole


@pytest.mark.parametrize("content", [b"{", b'[{"after": "x"}]', b'[{"after": "", "say": "", "when": 1}]'])
def test_an_invalid_script_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "script.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--mock-script"):
        read_mock_script(path, TOKENIZER_FILE, END_ID)
