"""FastChat's controller and API server with a worker of a real server, and a kill of that server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from fastchat.conversation import get_conv_template

SAMPLING = {"temperature": 0.0, "max_tokens": 12}
MESSAGES = [
    {"role": "system", "content": "Be brief: yes."},
    {"role": "user", "content": "def f(x):"},
    {"role": "assistant", "content": "    return x"},
    {"role": "user", "content": "class Stack:"},
]


def post(url: str, body: object = None) -> tuple[int, bytes]:
    request = urllib.request.Request(
        url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def request_json(url: str, body: object = None) -> dict[str, object]:
    status, body_bytes = post(url, body)
    assert status == 200, (url, status, body_bytes)
    return dict(json.loads(body_bytes))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < until_s, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.1)  # FastChat sends no event: poll


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *words])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def worker(server: str, controller: str) -> Iterator[str]:
    port = free_port()
    flags = ("--server", server, "--controller-address", controller, "--port", str(port), "--heartbeat", "1")
    with running("quintet.deploy.integrations.fastchat.worker", *flags):
        yield f"http://localhost:{port}"


def models(controller: str) -> list[str]:
    listed = request_json(f"{controller}/list_models")["models"]
    assert isinstance(listed, list)
    return sorted(listed)


def text_of(answer: dict[str, object]) -> str:
    assert isinstance(answer["choices"], list)
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def events_of(body_bytes: bytes) -> list[dict[str, object]]:
    lines = [line[6:] for line in body_bytes.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_chat(api: str, server: str, model: str) -> None:
    """The text equals that of the server with its chat template, for all kinds of conversations."""
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}]
    for messages in (MESSAGES, MESSAGES[1:2], in_parts):
        body = {"model": model, "messages": messages, **SAMPLING}
        expected = request_json(f"{server}/v1/chat/completions", body)
        answer = request_json(f"{api}/v1/chat/completions", body)
        assert text_of(answer) == text_of(expected)
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]  # type: ignore[index]
        reason = expected["choices"][0]["finish_reason"]  # type: ignore[index]
        assert answer["choices"][0]["finish_reason"] == reason  # type: ignore[index]
        events = events_of(post(f"{api}/v1/chat/completions", {**body, "stream": True})[1])
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]  # type: ignore[index]
        assert "".join(pieces) == text_of(expected)
        assert events[-1]["choices"][0]["finish_reason"] == reason  # type: ignore[index]


def check_completions(api: str, server: str, model: str) -> None:
    body = {"model": model, "prompt": "def f(x):", "logprobs": 1, **SAMPLING}
    expected, answer = (request_json(f"{url}/v1/completions", body) for url in (server, api))
    assert text_of(answer) == text_of(expected)
    assert answer["choices"][0]["logprobs"]["tokens"] == expected["choices"][0]["logprobs"]["tokens"]  # type: ignore[index]
    events = events_of(post(f"{api}/v1/completions", {**body, "stream": True})[1])
    assert "".join(event["choices"][0]["text"] for event in events) == text_of(expected)  # type: ignore[index]
    assert text_of(
        request_json(f"{api}/v1/completions", {**body, "echo": True, "logprobs": None})
    ).startswith("def f(x):")
    several = request_json(
        f"{api}/v1/completions", {**body, "n": 2, "prompt": ["a", "b"], "top_p": 0, "top_k": -1}
    )
    assert len(several["choices"]) == 4  # type: ignore[arg-type]
    stop = text_of(expected)[2:5]
    assert (
        text_of(request_json(f"{api}/v1/completions", {**body, "stop": stop}))
        == text_of(expected).partition(stop)[0]
    )


def check_errors(api: str, address: str, model: str) -> None:
    for body, code, words in (
        ({"model": "another"}, 40301, "another"),
        ({"model": model, "max_tokens": 0}, 40302, "max_tokens"),
        (
            {"model": model, "messages": [{"role": "user", "content": "x " * 100_000}]},
            40303,
            "maximum context length",
        ),
        ({"model": model, "presence_penalty": 7.0}, 40302, "presence_penalty"),
    ):
        status, body_bytes = post(f"{api}/v1/chat/completions", {"messages": MESSAGES, **body})
        error = json.loads(body_bytes)
        assert (status, error["code"]) == (400, code) and words in error["message"], error
    long = request_json(f"{address}/worker_generate", {"prompt": "x " * 100_000})
    assert long["error_code"] == 40303, long


def check_web_server(address: str, server: str, model: str) -> None:
    """FastChat's web server formats the prompt and sends it to the worker directly."""
    conversation = get_conv_template("vicuna_v1.1")
    conversation.append_message(conversation.roles[0], "Tell me a story")
    conversation.append_message(conversation.roles[1], None)
    prompt = conversation.get_prompt()
    fields = {"model": model, "prompt": prompt, "temperature": 0.0, "max_new_tokens": 12, "echo": False}
    pieces = post(f"{address}/worker_generate_stream", {**fields, "stop": conversation.stop_str})[1].split(
        b"\0"
    )
    expected = request_json(
        f"{server}/v1/completions", {"prompt": prompt, "stop": conversation.stop_str, **SAMPLING}
    )
    assert pieces[-1] == b"" and json.loads(pieces[-2])["text"] == text_of(expected)


def check_loss(controller: str, api: str) -> None:
    """A killed server is withdrawn; its worker registers again after the restart."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "quintet",
        "serve",
        "--executor",
        "mock",
        "--served-model-name",
        "mocked",
        "--port",
        port,
    ]

    def boot() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=True)

    body = {"model": "mocked", "prompt": "x", "max_tokens": 4}
    server = boot()
    try:
        with worker(f"http://127.0.0.1:{port}", controller) as address:
            wait_until(lambda: "mocked" in models(controller), "registration")
            assert text_of(request_json(f"{api}/v1/completions", body))
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            assert request_json(f"{address}/worker_generate", {"prompt": "x"})["error_code"] == 50006
            wait_until(lambda: "mocked" not in models(controller), "it is withdrawn", 10)
            assert json.loads(post(f"{api}/v1/completions", body)[1])["code"] == 40301
            server = boot()
            wait_until(lambda: "mocked" in models(controller), "registration after the restart")
            assert text_of(request_json(f"{api}/v1/completions", body))
        wait_until(lambda: "mocked" not in models(controller), "withdrawal of a stopped worker", 10)
    finally:
        server.terminate()
        server.wait(60)


def main(server: str, model: str) -> None:
    port, api_port = str(free_port()), str(free_port())
    controller, api = f"http://localhost:{port}", f"http://localhost:{api_port}"
    api_flags = ("--host", "localhost", "--port", api_port, "--controller-address", controller)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running("fastchat.serve.controller", "--port", port))
        stack.enter_context(running("fastchat.serve.openai_api_server", *api_flags))
        address = stack.enter_context(worker(server, controller))
        wait_until(lambda: models(controller) == [model], "registration")
        wait_until(lambda: bool(post(f"{api}/v1/models")), "readiness of FastChat's API")
        check_chat(api, server, model)
        check_completions(api, server, model)
        check_errors(api, address, model)
        check_web_server(address, server, model)
        check_loss(controller, api)
        first.kill()
        first.wait()
        stack.enter_context(running("fastchat.serve.controller", "--port", port))
        wait_until(lambda: models(controller) == [model], "registration at a new controller")


main(*sys.argv[1:3])
