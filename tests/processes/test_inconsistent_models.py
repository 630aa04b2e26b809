"""Models with inconsistent files: valid requests are served, others end with an error."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from quintet.process.sockets import FrameHmac, run_key
from quintet.wire import codec
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from tests.deploy.config.model_folder import write_model

from .server import Server, serve

C, H = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def vocab_size() -> int:
    """Vocabulary size of the embedded model's tokenizer."""
    return Tokenizer.from_file(str(default_model_path() / "tokenizer.json")).get_vocab_size()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vocab_size: int) -> Iterator[Server]:
    """Server of a model with an added token and an end-of-sequence id beyond the vocabulary."""
    folder = write_model(
        tmp_path_factory.mktemp("model"),
        vocab_size=vocab_size,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=[2, vocab_size],
    )
    (folder / "generation_config.json").write_text('{"max_new_tokens": 2048, "top_p": 0.9}')
    (folder / "tokenizer_config.json").write_text(
        '{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}'
    )
    tokenizer = Tokenizer.from_file(str(default_model_path() / "tokenizer.json"))
    assert tokenizer.add_special_tokens(["[PAD]"]) == 1
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ("--executor", "mock", "--step-ms", "5", "--max-logprobs", "1000000", "--drain-timeout", "20")
    with serve(str(folder), *flags) as server:
        yield server
        assert server.stop() == 0


def test_ignored_eos_token_is_noted_once(server: Server, vocab_size: int) -> None:
    notes = [line for line in server.lines if "note:" in line]
    assert len(notes) == 1 and f"eos_token_id {vocab_size} of" in notes[0], notes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        (C, "prompt", {"prompt": "once [PAD] upon"}),
        (C, "prompt", {"prompt": ["once", "upon [PAD]"]}),
        (C, "prompt", {"prompt": [5, "beyond"]}),
        (H, "messages", {"messages": [{"role": "user", "content": "[PAD]"}]}),
        (C, "bad_words", {"prompt": "once", "bad_words": ["[PAD]"]}),
        (C, "stop_token_ids", {"prompt": "once", "stop_token_ids": ["beyond"]}),
        (C, "logprobs", {"prompt": "once", "logprobs": "beyond + 1"}),
    ],
)
def test_tokens_beyond_the_vocabulary_are_rejected(
    server: Server, vocab_size: int, path: str, param: str, body: dict[str, Any], stream: bool
) -> None:
    beyond = {"beyond": vocab_size, "beyond + 1": vocab_size + 1}
    sent = {
        name: [beyond.get(item, item) if isinstance(item, str) else item for item in value]
        if isinstance(value, list)
        else beyond.get(value, value)
        for name, value in body.items()
    }
    status, answer = server.post(path, {**sent, "stream": stream, "max_tokens": 2})
    assert status == 400 and answer["error"]["param"] == param, answer
    assert str(vocab_size) in answer["error"]["message"]


def test_inconsistent_model_is_served(server: Server) -> None:
    """A default of 2048 tokens rejects no request; an unreachable end-of-sequence id fails no step."""
    status, answer = server.post(C, {"prompt": "once", "seed": 1})
    assert status == 200 and answer["usage"]["completion_tokens"] <= MAX_MODEL_LEN
    long = {"prompt": [5] * (MAX_MODEL_LEN - 12), "seed": 1}
    status, answer = server.post(C, long)
    assert status == 200 and answer["usage"]["completion_tokens"] <= 12
    status, answer = server.post(C, {**long, "max_tokens": 13})
    assert status == 400 and answer["error"]["param"] == "max_tokens"


def test_dropped_message_ends_its_request_with_an_error(server: Server, vocab_size: int) -> None:
    """An invalid message with a valid HMAC ends its stream; the next request is served."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    body = {"prompt": "once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection.request("POST", C, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    request_id = int(str(response.getheader("x-stream-id")).partition("-")[0], 16)
    response.readline()
    core = server.children()["quintet-core-0"]
    inbox = next(path for path in map(_bound, core.net_connections("unix")) if path.name.startswith("core-"))
    params = SamplingParams(seed=1)
    nonsense = Admit(request_id, codec.pack_i32([vocab_size]), RequestSpec(params, 0, 0, attempt=1), 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(f"ipc://{inbox}")
    outbox.send(FrameHmac(run_key(inbox.parent)).sign(codec.encode(nonsense)))
    events = [line for line in response.read().decode().splitlines() if line.startswith("data: ")]
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert events[-1] == "data: [DONE]" and error["code"] == "500"
    assert "the core received a message (admit)" in error["message"]
    outbox.close()
    context.term()
    connection.close()
    assert server.post(C, {"prompt": "once", "max_tokens": 2})[0] == 200


def _bound(connection: Any) -> Path:
    return Path(str(connection.laddr))
