"""KServe's clients: all protocols of the predictor, and health paths of a plain server."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.errors import InvalidInput, ModelNotReady

from quintet.deploy.integrations.kserve.predictor import TextGeneration
from quintet.deploy.python_api.engine import EngineError
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import SamplingParams

PROMPTS = ["def f(x):", "class Stack:"]
SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def answers_of(server: str) -> list[str]:
    """Return the server's completions of the prompts."""
    texts = []
    for prompt in PROMPTS:
        body = json.dumps({"prompt": prompt, **SAMPLING}).encode()
        request = urllib.request.Request(
            server + "/openai/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            texts.append(json.loads(answer.read())["choices"][0]["text"])
    return texts


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tensor(model: str, prompts: list[str], parameters: dict[str, object]) -> InferRequest:
    data = InferInput(name="prompt", shape=[len(prompts)], datatype="BYTES", data=prompts)
    return InferRequest(model_name=model, infer_inputs=[data], parameters=parameters)


def text_of(response: object) -> list[str]:
    assert [output.name for output in response.outputs] == ["text", "finish_reason"]
    assert response.outputs[1].as_numpy().tolist() in (["length"] * 2, [b"length"] * 2)
    return [
        text.decode() if isinstance(text, bytes) else text for text in response.outputs[0].as_numpy().tolist()
    ]


async def check_rejected(call: object, words: str) -> None:
    try:
        await call
    except httpx.HTTPStatusError as error:
        assert error.response.status_code == 400 and words in error.response.text, error.response.text
    else:
        raise AssertionError(f"not rejected: {words}")


async def wait_ready(client: InferenceRESTClient, url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the predictor ended"
        try:
            if await client.is_server_ready(url):
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("the predictor was not ready within a minute")


async def check_server(server: str, model: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(server)
    assert await client.is_server_ready(server)
    assert await client.is_model_ready(server, model)
    assert not await client.is_model_ready(server, "another")


async def check_predictor(url: str, grpc: str, expected: list[str], process: subprocess.Popen[bytes]) -> None:
    v1, v2 = (InferenceRESTClient(RESTConfig(protocol=protocol, timeout=60)) for protocol in ("v1", "v2"))
    await wait_ready(v2, url, process)
    assert await v2.is_model_ready(url, "toy")

    reply = await v1.infer(url, {"instances": PROMPTS, "parameters": SAMPLING}, model_name="toy")
    assert [answer["text"] for answer in reply["predictions"]] == expected
    own = [{"prompt": PROMPTS[0], "max_tokens": 3, "stop": "\n"}]
    reply = await v1.infer(url, {"instances": own, "parameters": SAMPLING}, model_name="toy")
    assert expected[0].startswith(reply["predictions"][0]["text"])

    assert text_of(await v2.infer(url, tensor("toy", PROMPTS, SAMPLING), model_name="toy")) == expected
    async with InferenceGRPCClient(grpc, timeout=60) as client:
        as_text = {"temperature": "0.0", "max_tokens": 12, "ignore_eos": True}
        assert text_of(await client.infer(tensor("toy", PROMPTS, as_text))) == expected

    await check_rejected(v1.infer(url, {"instances": [5]}, model_name="toy"), "The prompt is 5; send a text")
    await check_rejected(v1.infer(url, {"instances": []}, model_name="toy"), "with at least one prompt")
    warm = {"instances": ["x"], "parameters": {"temperature": -1}}
    await check_rejected(v1.infer(url, warm, model_name="toy"), "temperature")
    await check_rejected(
        v2.infer(url, tensor("toy", ["x"], {"beams": 2}), model_name="toy"),
        "beams is not a supported parameter",
    )


class Scripted:
    """Fake engine that raises an error, or returns its stop texts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def generate(self, prompt: str, params: SamplingParams) -> AsyncIterator[SimpleNamespace]:
        if self.error is not None:
            raise self.error
        yield SimpleNamespace(outputs=[SimpleNamespace(text=repr(params.stop), finish_reason="stop")])


async def check_endings() -> None:
    """Engine and overload errors are ModelNotReady, invalid requests InvalidInput; ``stop`` "1" stays a text."""
    for error, expected in (
        (EngineError("was shut down"), ModelNotReady),
        (RequestError(ErrorCode.OVERLOADED, "was shut out"), ModelNotReady),
        (RequestError(ErrorCode.INVALID, "was wrong"), InvalidInput),
    ):
        try:
            await TextGeneration("toy", Scripted(error)).predict({"instances": PROMPTS})
        except expected as caught:
            assert error.args[0] in str(caught)
        else:
            raise AssertionError(f"not raised: {error}")
    request = tensor("toy", ["x"], {"stop": "1", "temperature": "0.5"})
    request.from_grpc = True
    answer = await TextGeneration("toy", Scripted()).predict(request)
    assert answer.outputs[0].data == ["['1']"]


def main(server: str, model: str) -> None:
    asyncio.run(check_endings())
    asyncio.run(check_server(server, model))
    port, grpc_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "quintet.deploy.integrations.kserve.predictor", "--model_name", "toy",
        "--http_port", str(port), "--grpc_port", str(grpc_port),
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        url, grpc = f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
        asyncio.run(check_predictor(url, grpc, answers_of(server), process))
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


main(*sys.argv[1:3])
