"""Beam search and ``best_of`` on a real server in fp32, compared with transformers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from quintet.deploy.embedded import default_model_path
from tests.processes.server import Server, serve
from tests.processes.test_tool_calls import StreamClient

C, H = "/v1/completions", "/v1/chat/completions"
PROMPT = "A mouse and a"
BEAMS: dict[str, Any] = {
    "prompt": PROMPT,
    "use_beam_search": True,
    "max_tokens": 24,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--kv-cache-memory", "64MiB", "--max-model-len", "512", "--dtype", "float32")
    with serve(*flags) as server:
        yield server


def answer(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, found = server.post(path, body)
    assert status == 200, found
    return dict(found)


@cache
def reference_beams(
    ids: tuple[int, ...], width: int, penalty: float, max_tokens: int
) -> list[tuple[list[int], float]]:
    """Return the continuations of a prompt and their scores from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([ids]),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    end = model.generation_config.eos_token_id
    answers = []
    for whole, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        outputs = whole[len(ids) :]
        outputs = outputs[: outputs.index(end) + 1] if end in outputs else outputs
        answers.append((outputs, score))
    return answers


@pytest.mark.whole  # imports transformers; tests/models/test_beam_search.py tests the search in one process
def test_beams_equal_transformers(server: Server) -> None:
    for width, penalty in ((4, 1.0), (3, 0.0)):
        found = answer(server, C, {**BEAMS, "n": width, "length_penalty": penalty, "logprobs": 1})
        choices = found["choices"]
        expected_beams = reference_beams(tuple(choices[0]["prompt_token_ids"]), width, penalty, 24)
        assert [choice["token_ids"] for choice in choices] == [ids for ids, _ in expected_beams]
        totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        scores = [total / len(ids) ** penalty for total, (ids, _) in zip(totals, expected_beams, strict=True)]
        assert scores == pytest.approx([score for _, score in expected_beams], abs=1e-4)
        assert [choice["index"] for choice in choices] == [*range(width)]
        ended = [len(choice["token_ids"]) < 24 for choice in choices]
        assert [choice["finish_reason"] == "stop" for choice in choices] == ended
        usage = found["usage"]
        assert usage["prompt_tokens"] == len(choices[0]["prompt_token_ids"])
        assert usage["completion_tokens"] == sum(len(ids) for ids, _ in expected_beams)


def test_best_of_limits_choices_in_a_batch_of_prompts(server: Server) -> None:
    alone = answer(server, C, {**BEAMS, "n": 4})["choices"]
    together = answer(server, C, {**BEAMS, "prompt": ["Once", PROMPT], "n": 2, "best_of": 4, "echo": True})[
        "choices"
    ]
    assert [choice["token_ids"] for choice in together[2:]] == [choice["token_ids"] for choice in alone[:2]]
    assert [choice["text"] for choice in together[2:]] == [PROMPT + choice["text"] for choice in alone[:2]]
    assert together[0]["text"].startswith("Once")


def test_a_beam_shows_the_stop_token_on_request(server: Server) -> None:
    """As a sampled output does."""
    body = BEAMS | {"n": 1, "max_tokens": 4}
    body["stop_token_ids"] = answer(server, C, body)["choices"][0]["token_ids"][-1:]
    (hidden,) = answer(server, C, body)["choices"]
    (shown,) = answer(server, C, body | {"include_stop_str_in_output": True})["choices"]
    assert hidden["finish_reason"] == shown["finish_reason"] == "stop"
    assert shown["text"].startswith(hidden["text"]) and len(shown["text"]) > len(hidden["text"])


@pytest.mark.parametrize("path", [C, H])
def test_streamed_beams_equal_the_whole_response(server: Server, path: str) -> None:
    """Each beam is sent at the end with its log-probabilities; the usage is last."""
    body: dict[str, Any] = {**BEAMS, "n": 3, "max_tokens": 8, "logprobs": 1}
    if path == H:
        body |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
        del body["prompt"]
    whole = answer(server, path, body)
    events = list(
        StreamClient(
            server, path, body | {"stream": True, "stream_options": {"include_usage": True}}
        ).events()
    )
    for expected in whole["choices"]:
        mine = [
            event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == expected["index"]
        ]
        said = expected["text"] if path == C else expected["message"]["content"]
        assert (
            "".join(each["text"] if path == C else each["delta"].get("content") or "" for each in mine)
            == said
        )
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        assert mine[-1]["token_ids"] == expected["token_ids"]
        assert mine[-1]["logprobs"] == expected["logprobs"]
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.whole  # imports transformers
def test_chat_beams_equal_transformers(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "use_beam_search": True,
        "n": 3,
        "max_tokens": 8,
    }
    body |= {"return_token_ids": True, "logprobs": True}
    found = answer(server, H, body)
    expected_beams = reference_beams(tuple(found["prompt_token_ids"]), 3, 1.0, 8)
    assert [choice["token_ids"] for choice in found["choices"]] == [ids for ids, _ in expected_beams]
    for choice in found["choices"]:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert choice["message"]["content"] == "".join(tokens).removesuffix("<|im_end|>")


def test_best_of_ranks_by_log_probability(server: Server) -> None:
    ask = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "temperature": 1.0, "return_token_ids": True}
    drawn = answer(server, C, {**ask, "n": 6, "logprobs": 0})["choices"]
    ranked = sorted(drawn, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    found = answer(server, C, {**ask, "n": 2, "best_of": 6})
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][0]["logprobs"] is None
    assert found["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in drawn)


def test_beams_beyond_the_context_length_are_rejected(server: Server) -> None:
    status, found = server.post(C, {**BEAMS, "n": 2, "max_tokens": 512})
    assert status == 400 and "maximum context length is 512" in found["error"]["message"]


@pytest.mark.whole  # rounds are plain requests; tests/chaos tests their resumption
@pytest.mark.parametrize("role", ["executor", "core", "detokenizer", "tokenizer"])
def test_kill_of_a_process_keeps_the_beams(server: Server, role: str) -> None:
    body = {**BEAMS, "n": 4, "max_tokens": 120}
    undisturbed = answer(server, C, body)["choices"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answer(server, C, body)["choices"]))
    thread.start()
    time.sleep(0.2)  # kill during the rounds; the exact round is irrelevant
    server.children()[f"quintet-{role}-0"].kill()
    thread.join(60)
    assert found == [undisturbed]
