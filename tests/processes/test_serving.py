"""OpenAI API of a real server with the embedded model."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.deploy.integrations.prometheus_queries import labels_of, names_in, queries, variables
from tests.processes.server import Server, serve, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--kv-cache-memory", "64MiB", "--max-model-len", "512") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_only_the_executor_loads_torch(server: Server) -> None:
    children = server.children()
    assert sorted(children) == [
        "quintet-core-0",
        "quintet-detokenizer-0",
        "quintet-executor-0",
        "quintet-frontend-0",
        "quintet-tokenizer-0",
    ]
    with_torch = [
        title
        for title, process in children.items()
        if any("libtorch" in mapping.path for mapping in process.memory_maps())
    ]
    assert with_torch == ["quintet-executor-0"]


def test_startup_log_ends_with_a_working_curl_command(server: Server) -> None:
    assert len(server.lines) < 20, "\n".join(server.lines)
    command = next(line.strip() for line in server.lines if line.strip().startswith("curl "))
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert '"text_completion"' in answer.stdout, answer.stdout
    assert answer.stdout.rstrip().endswith("data: [DONE]")


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}
    plain = client.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].text
    assert text.strip()
    assert plain.usage.completion_tokens == chunks[-1].usage.completion_tokens
    assert plain.choices[0].finish_reason == [c.choices[0].finish_reason for c in chunks if c.choices][-1]


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What does json.dumps do?"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]
    assert streamed == answer.choices[0].message.content


def test_choices_with_a_seed_are_reproducible(client: openai.OpenAI, model: str) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model=model, prompt="import os\n", n=4, max_tokens=12, temperature=1.0, seed=11, logprobs=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice in answer.choices:
            assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.token_logprobs) <= 12
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) > 1


def test_stop_string_is_excluded_from_the_text(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="for i in range(", max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.completions.create(
        model=model, prompt="for i in range(", max_tokens=40, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_echo_and_prompt_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="import sys", echo=True, max_tokens=4, temperature=0, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text.startswith("import sys")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert answer.usage is not None
    assert len(choice.logprobs.token_logprobs) == answer.usage.total_tokens


def test_prefix_cache_hit_is_reported_in_usage(client: openai.OpenAI, model: str) -> None:
    prompt = "class Stack:\n" + "    # a comment that fills the cache\n" * 20
    first, second = (
        client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0) for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_detokenize_inverts_tokenize(server: Server) -> None:
    status, answer = server.post("/tokenize", {"prompt": "héllo wörld 🙂"})
    assert status == 200
    assert server.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "héllo wörld 🙂"})


@pytest.mark.parametrize(
    ("body", "status", "message_part"),
    [
        ({"model": "unknown", "prompt": "x"}, 404, "unknown"),
        ({"prompt": "x", "temperature": 9}, 400, "temperature"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({"prompt": "word " * 2000}, 400, "512"),
        ({"prompt": [1, 99999999]}, 400, "99999999"),
        ({"prompt": ""}, 400, "prompt"),
    ],
)
def test_invalid_requests_are_rejected(
    server: Server, body: dict[str, object], status: int, message_part: str
) -> None:
    got, answer = server.post("/v1/completions", body)
    assert got == status, answer
    assert message_part in answer["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "ok", "max_tokens": 1})[0] == 200


def test_health_metrics_and_documentation_endpoints(server: Server) -> None:
    for path in ("/health", "/livez", "/readyz", "/version", "/docs"):
        assert server.get(path)[0] == 200, path
    document = json.loads(server.get("/openapi.json")[1])
    assert "/v1/chat/completions" in document["paths"]
    text = server.get("/metrics")[1]
    for name in (
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "quintet:tokenize_seconds_bucket",
        "quintet:detokenize_seconds_bucket",
        "quintet:hop_seconds_bucket",
        "quintet:stream_write_seconds_bucket",
    ):
        assert re.search(rf"^{name}{{", text, re.MULTILINE), name


def test_metrics_of_dashboards_and_scalers_exist(server: Server) -> None:
    server.post("/v1/nowhere", {})
    labels = labels_of(server.get("/metrics")[1])
    names = [(query.where, *named) for query in queries() for named in names_in(query.text)]
    names += [
        (f"variable {label}", name, {label}) for text, label in variables() for name, _ in names_in(text)
    ]
    assert len(names) > 60
    assert [(where, name) for where, name, by in names if not by <= labels.get(name, set())] == []


def test_every_series_is_on_the_page_of_metrics(server: Server) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    series = re.findall(r"^# TYPE quintet:(\w+) ", server.get("/metrics")[1], re.MULTILINE)
    assert len(series) > 60
    assert [name for name in series if f"| `quintet:{name}` |" not in page] == []


def test_complete_command(server: Server) -> None:
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "quintet.deploy.cli.main",
            "complete",
            "--url",
            server.url,
            "--max-tokens",
            "8",
            "def f(",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.strip()


@pytest.mark.whole
def test_tokenizing_huge_texts_frees_memory(server: Server) -> None:
    tokenizer, frontend = server.children()["quintet-tokenizer-0"], server.children()["quintet-frontend-0"]
    before, frontend_before = tokenizer.memory_info().rss, frontend.memory_info().rss
    Path(f"/proc/{tokenizer.pid}/clear_refs").write_text("5")  # resets the peak
    words = "the quick brown fox jumps over the lazy dog and " * 100_000
    texts = [
        words,
        "0123456789 " * 700_000,
        "\U0001f642\U0001f680 " * 400_000,
        "\u4e2d\u6587\u5b57\u3002" * 400_000,
    ]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda text: server.post("/tokenize", {"prompt": text}), texts))
    assert all(status == 200 and answer["count"] > 1 << 20 for status, answer in answers)
    status = Path(f"/proc/{tokenizer.pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kib << 10 < before + (400 << 20), "a text encoded in one call takes 700 MiB"
    wait_until(lambda: tokenizer.memory_info().rss < before + (200 << 20), "a lower RSS")
    assert frontend.memory_info().rss < frontend_before + (200 << 20)
    status, answer = server.post("/tokenize", {"prompt": "0123456789" * 800_000})
    assert status == 400 and "of one kind" in answer["error"]["message"]


def test_echo_of_special_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=[0, 0, 0],
        max_tokens=1,
        echo=True,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    plain = client.completions.create(model=model, prompt=[0, 0, 0], max_tokens=1, echo=True, logprobs=1)
    as_ids, as_text = answer.choices[0].logprobs, plain.choices[0].logprobs
    assert (
        as_ids is not None
        and as_text is not None
        and as_ids.tokens is not None
        and as_text.tokens is not None
    )
    assert as_ids.tokens[:3] == ["token_id:0"] * 3 and len(as_ids.tokens) == 4
    assert plain.choices[0].text.startswith("".join(as_text.tokens[:3])) and len(set(as_text.tokens[:3])) == 1
    assert as_text.text_offset == [len("".join(as_text.tokens[:i])) for i in range(4)]


def test_generate_from_rendered_ids_equals_the_completion(
    server: Server, client: openai.OpenAI, model: str
) -> None:
    ask = {"model": model, "prompt": "def fibonacci(n):", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0]  # type: ignore[call-overload]
    status, (rendered,) = server.post("/v1/completions/render", ask)
    assert status == 200 and rendered["token_ids"] == plain.prompt_token_ids
    status, whole = server.post("/inference/v1/generate", rendered)
    assert status == 200 and whole["choices"][0]["token_ids"] == plain.token_ids
    assert whole["choices"][0]["finish_reason"] == plain.finish_reason
    request = urllib.request.Request(
        server.url + "/inference/v1/generate",
        json.dumps({**rendered, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        first = answer.readline().decode()  # then the connection is closed
    stream, _, position = first.removeprefix("id: ").strip().partition(":")
    assert position.isdigit()
    status, rest = server.get(f"/v1/streams/{stream}?from={position}")
    events = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
    rest_ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert status == 200 and rest_ids == plain.token_ids[int(position) :]


def test_repetition_detection_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt="def fibonacci(n):",
        max_tokens=40,
        logit_bias={"100": 100},
        extra_body={"repetition_detection": {"max_pattern_size": 3, "min_count": 5}},
    )
    choice, usage = answer.choices[0].model_dump(), answer.usage
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert usage is not None and usage.completion_tokens == 5


def test_derender_of_generated_ids_equals_the_chat(server: Server) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Add two numbers."}], "max_tokens": 20, "temperature": 0, "stop": ["\n\n"],
    }  # fmt: skip
    _, plain = server.post("/v1/chat/completions", chat)
    _, rendered = server.post("/v1/chat/completions/render", chat)
    _, generated = server.post("/inference/v1/generate", rendered)
    status, answer = server.post(
        "/v1/chat/completions/derender", {"generate_response": generated, "chat_request": chat}
    )
    assert status == 200
    (ours,), (theirs,) = answer["choices"], plain["choices"]
    for name in ("message", "finish_reason", "stop_reason"):
        assert ours[name] == theirs[name], name
    status, alone = server.post("/v1/chat/completions/derender", {"generate_response": generated})
    assert status == 200
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert alone["usage"][name] == answer["usage"][name] == plain["usage"][name]


def test_render_of_each_api_equals_its_generation(server: Server) -> None:
    """Includes a stored conversation: the rendered ids contain its earlier turns."""
    hello = [{"role": "user", "content": "Add two numbers."}]
    _, chat = server.post(
        "/v1/chat/completions/render", {"messages": hello, "max_tokens": 20, "temperature": 0}
    )
    message = {"messages": hello, "max_tokens": 20, "temperature": 0}
    response = {"input": "Add two numbers.", "max_output_tokens": 20, "temperature": 0}
    for path, body in (("/v1/messages", message), ("/v1/responses", response)):
        status, rendered = server.post(path + "/render", body)
        assert status == 200
        assert (rendered["token_ids"], rendered["sampling_params"]) == (
            chat["token_ids"],
            chat["sampling_params"],
        )
        _, generated = server.post("/inference/v1/generate", rendered)
        _, text = server.post("/detokenize", {"tokens": generated["choices"][0]["token_ids"]})
        _, answer = server.post(path, body)
        blocks = answer.get("content") or answer["output"][0]["content"]
        assert text["prompt"].removesuffix("<|im_end|>") == blocks[0]["text"]
    status, error = server.post("/v1/responses/render", {"input": "x " * 5000})
    assert status == 400 and error["error"]["message"].startswith("This model's maximum context length")
    more = {**response, "input": "And three?", "previous_response_id": answer["id"]}
    status, rendered = server.post("/v1/responses/render", more)
    assert (
        status == 200
        and len(rendered["token_ids"]) == server.post("/v1/responses", more)[1]["usage"]["input_tokens"]
    )


def test_metrics_are_current(server: Server, client: openai.OpenAI, model: str) -> None:
    wait_until(lambda: server.gauge("quintet:num_requests_running") == 0, "an idle server")
    for _ in range(3):
        before = server.gauge("quintet:generation_tokens_total")
        client.completions.create(model=model, prompt="x", max_tokens=7, extra_body={"ignore_eos": True})
        assert server.gauge("quintet:generation_tokens_total") == before + 7
