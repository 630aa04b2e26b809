"""POST /v1/completions, through the openai client and raw HTTP."""

from typing import Any

from openai import OpenAI


def test_a_plain_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == " t0 t1 t2"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 3)


def test_a_streamed_completion(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="toy", prompt="hello", max_tokens=3, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == " t0 t1 t2"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_raw_stream(shared: Any) -> None:
    reply = shared.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    print(reply.body.decode())
