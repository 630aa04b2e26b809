"""Prompt embeddings on a real server: rows of the embedding table give the tokens' output."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from quintet import LLM, SamplingParams
from quintet.deploy.embedded import default_model_path
from quintet.deploy.python_api.inputs import PromptInput
from tests.processes.server import Server, serve
from tests.processes.test_tool_calls import StreamClient

C = "/v1/completions"
WORDS = "Once upon a time, a little mouse lived in a big house near the old river. Every day the mouse went"
ASK: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--kv-cache-memory", "64MiB", "--max-model-len", "512", "--enable-prompt-embeds")
    with serve(*flags, "--max-num-batched-tokens", "64") as server:
        yield server


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The model's embedding table."""
    with safe_open(str(Path(default_model_path()) / "model.safetensors"), framework="pt") as file:
        return file.get_tensor("model.embed_tokens.weight")


@pytest.fixture(scope="module")
def ids(server: Server) -> list[int]:
    status, found = server.post("/tokenize", {"prompt": WORDS})
    assert status == 200
    return [int(token) for token in found["tokens"]]


def encoded(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"prompt_embeds": tensor.contiguous()})).decode()


def completed(server: Server, **body: Any) -> Any:
    status, found = server.post(C, {**ASK, **body})
    assert status == 200, found
    return found


def test_embeddings_of_tokens_equal_the_tokens(server: Server, table: torch.Tensor, ids: list[int]) -> None:
    """Single, with several choices, with a text prompt, and streamed as vLLM's clients send them (prompt "")."""
    plain = completed(server, prompt=ids)
    vectors = encoded(table[ids])
    alone = completed(server, prompt_embeds=vectors)
    assert alone["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert alone["choices"][0]["prompt_token_ids"] is None
    assert alone["usage"] == plain["usage"] and alone["usage"]["prompt_tokens"] == len(ids)
    drawn = {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2}
    several = completed(server, prompt_embeds=vectors, **drawn)["choices"]
    for found, expected in zip(several, completed(server, prompt=ids, **drawn)["choices"], strict=True):
        assert found["token_ids"] == expected["token_ids"]
        assert found["logprobs"]["token_logprobs"] == expected["logprobs"]["token_logprobs"]
    together = completed(server, prompt=WORDS, prompt_embeds=[vectors, encoded(table[ids[:5]].float()[None])])
    assert [choice["token_ids"] for choice in together["choices"]] == [
        plain["choices"][0]["token_ids"],
        completed(server, prompt=ids[:5])["choices"][0]["token_ids"],
        completed(server, prompt=WORDS)["choices"][0]["token_ids"],
    ]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt="",
            stream=True,
            extra_body={**ASK, "prompt_embeds": vectors},
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == alone["choices"][0]["text"]


@pytest.mark.whole  # the dictionary's fields: tests/api/test_llm.py
def test_python_api_takes_prompt_embeds(table: torch.Tensor, ids: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(enable_prompt_embeds=True, max_model_len=512, kv_cache_memory="64MiB") as llm:
        prompts: list[PromptInput] = [ids, {"prompt_embeds": table[ids]}]
        plain, embedded = llm.generate(prompts, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == embedded.outputs[0].token_ids


@pytest.mark.drawn(2)
@pytest.mark.parametrize("role", ["frontend", "tokenizer", "core", "executor", "detokenizer"])
def test_kill_of_a_process_keeps_the_text(
    server: Server, table: torch.Tensor, ids: list[int], role: str
) -> None:
    """Recovery recomputes from the prompt, so a process must have retained the embeddings."""
    body = {
        "max_tokens": 300,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 9,
        "prompt_embeds": encoded(table[ids]),
    }
    undisturbed = completed(server, **body)["choices"][0]["text"]
    text = ""
    for number, event in enumerate(StreamClient(server, C, body | {"stream": True}).events()):
        text += event["choices"][0]["text"]
        if number == 60:
            server.children()[f"quintet-{role}-0"].kill()
    assert text == undisturbed


def rejection(server: Server, **body: Any) -> tuple[str, str]:
    status, found = server.post(C, {**ASK, **body})
    assert status == 400, found
    return found["error"]["message"], found["error"]["param"]


def test_invalid_prompt_embeds_are_rejected(server: Server, table: torch.Tensor) -> None:
    width, good = table.shape[1], encoded(table[:3])
    pickled = io.BytesIO()
    torch.save(table[:3].clone(), pickled)
    header = b'{"a":{"dtype":"F32","shape":[2,%d],"data_offsets":[0,%d]}}' % (width, 8 * width)
    cut_off = base64.b64encode(len(header).to_bytes(8, "little") + header + b"\0" * 5).decode()
    with_nan = table[:3].float().clone()
    with_nan[1, 7] = torch.nan
    for body, param, words in (
        ({"prompt_embeds": "!!!!"}, "prompt_embeds", "not base64"),
        ({"prompt_embeds": "AAAAAAAAAAAA"}, "prompt_embeds", "not a safetensors file"),
        (
            {"prompt_embeds": base64.b64encode(pickled.getvalue()).decode()},
            "prompt_embeds",
            "torch.save file",
        ),
        ({"prompt_embeds": cut_off}, "prompt_embeds", "its header requires"),
        ({"prompt_embeds": encoded(table[:3, :-1])}, "prompt_embeds", f"[tokens, {width}]"),
        ({"prompt_embeds": encoded(table[:3].to(torch.int8))}, "prompt_embeds", "'I8'"),
        ({"prompt_embeds": encoded(table[:1].repeat(512, 1))}, "prompt_embeds", "512 in the prompt_embeds"),
        ({"prompt_embeds": "A" * (4 << 22)}, "prompt_embeds", "at least"),
        ({"prompt_embeds": encoded(with_nan)}, "prompt_embeds", "[1, 7]"),
        ({"prompt_embeds": encoded(with_nan.half())}, "prompt_embeds", "[1, 7]"),
        ({"prompt_embeds": encoded(with_nan.bfloat16())}, "prompt_embeds", "[1, 7]"),
        ({"prompt_embeds": encoded(with_nan.double())}, "prompt_embeds", "[1, 7]"),
        ({"prompt_embeds": 5}, "prompt_embeds", "must be"),
        ({"prompt_embeds": good, "echo": True}, "echo", "leave one of them out"),
        ({"prompt_embeds": good, "suffix": "x"}, "suffix", "leave one of them out"),
        ({"prompt_embeds": good, "use_beam_search": True}, "use_beam_search", "leave one of them out"),
        ({"prompt_embeds": good, "prompt_logprobs": 1}, "prompt_logprobs", "needs a prompt's tokens"),
        (
            {"prompt_embeds": good, "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "needs a prompt's tokens",
        ),
        ({"prompt_embeds": []}, "prompt", "missing"),
        ({"prompt_embeds": good, "max_tokens": 511}, "max_tokens", "maximum context length"),
    ):
        message, found = rejection(server, **body)
        assert words in message and found == param, (message, found)
