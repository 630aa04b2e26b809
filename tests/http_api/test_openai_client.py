"""The unmodified openai package as a client of the server."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="hello", max_tokens=3)
    assert answer.choices[0].text == " t0 t1 t2"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 3)


def test_a_streamed_completion(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="toy", prompt="hello", max_tokens=3, stream=True))
    assert [c.choices[0].text for c in chunks] == [" t0", " t1", " t2"]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, "length"]


def test_a_chat_with_every_sampling_field(client: OpenAI, shared: Any) -> None:
    answer = client.chat.completions.create(
        model="toy-alias",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=2,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": 10},
        seed=7,
        stop=["zzz"],
        n=2,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "bad_words": ["no"],
            "allowed_token_ids": [1, 2],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 8,
            "priority": 3,
            "cache_salt": "pepper",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert [choice.message.content for choice in answer.choices] == [" t0 t1", " t0 t1"]
    submit = shared.engine.wait_for(shared.kinds.Submit)[-1]
    params = submit.spec.params
    assert (params.n, params.max_tokens, params.seed, params.stop) == (2, 2, 7, ["zzz"])
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, -0.1, 1.1)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (1, True, [3])
    assert (params.bad_words, params.allowed_token_ids, params.logit_bias) == (["no"], [1, 2], {5: 10.0})
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert params.truncate_prompt_tokens == 8
    assert (submit.spec.priority, submit.spec.cache_salt) == (3, "pepper")
    assert submit.prompt.template_kwargs == b'{"enable_thinking":false}'


def test_a_streamed_chat_with_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " t0 t1"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=1,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert content[0].token == " t0"
    assert [top.token for top in content[0].top_logprobs] == [" t0", " t1"]


def test_a_request_without_a_seed_gets_a_random_one(client: OpenAI, shared: Any) -> None:
    for _ in range(2):
        client.completions.create(model="toy", prompt="x", max_tokens=1)
    seeds = [submit.spec.params.seed for submit in shared.engine.wait_for(shared.kinds.Submit)[-2:]]
    assert None not in seeds
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "toy-alias"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError, match="`gpt` does not exist"):
        client.models.retrieve("gpt")


def test_errors_map_to_the_clients_error_classes(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        client.completions.create(model="toy", prompt="x", temperature=3)
    with pytest.raises(openai.NotFoundError, match=r"`absent` does not exist.*`toy`"):
        client.completions.create(model="absent", prompt="x")


def test_keys_and_overload(serve: Callable[..., Any]) -> None:
    server = serve(api_keys=["right"], max_queued_requests=1)
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.completions.create(model="toy", prompt="x")
    with OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as right:
        assert right.completions.create(model="toy", prompt="x", max_tokens=1).choices[0].text == " t0"
        server.engine.held = True
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(right.completions.create, model="toy", prompt="x", max_tokens=1)
            server.engine.wait_for(server.kinds.Submit, 2)
            with pytest.raises(openai.RateLimitError) as refused:
                right.completions.create(model="toy", prompt="x")
            assert int(refused.value.response.headers["retry-after"]) >= 1
            server.call(server.engine.release)
            assert waiting.result(10).choices[0].text == " t0"


@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream"}])
def test_keep_alive_comments_are_not_events_of_the_client(
    serve: Callable[..., Any], headers: dict[str, str]
) -> None:
    """Beside event ids, comments must not add a blank line, which this client reads as an event."""
    server = serve(keep_alive_s=0.02)
    server.engine.silent_after = 1
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="toy", prompt="x", max_tokens=3, stream=True, extra_headers=headers
        )
        texts = [next(stream).choices[0].text]
        submit = server.engine.wait_for(server.kinds.Submit)[-1]
        time.sleep(0.1)  # several comments
        server.engine.silent_after = None
        server.call(server.engine.step, submit, 1, len(texts[0]))
        texts += [chunk.choices[0].text for chunk in stream]
    assert texts == [" t0", " t1", " t2"]
