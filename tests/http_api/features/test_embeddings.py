"""Endpoints of embeddings: vectors, their formats, similarities, and errors."""

import base64
import math
import socket
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tests.frontend.configs import make_config
from tests.http_api.conftest import Server

from quintet.frontend.api.pooling.vectors import vector_of
from quintet.wire.errors import RequestError
from quintet.wire.messages import Cancel, ChatPrompt, Submit, TextPrompt
from quintet.wire.pooling import PoolingConfig, PoolingType

E = "/v1/embeddings"


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that pools."""
    section = PoolingConfig(kind=PoolingType.LAST, width=4)
    server = Server(make_config(str(tmp_path_factory.mktemp("run")), pooling=section), {})
    yield server
    server.stop()


def unit(*components: float) -> Any:
    length = math.hypot(*components)
    return pytest.approx([each / length for each in components])


def test_openai_client(pooling: Server) -> None:
    """The client asks for base64 by default."""
    with OpenAI(base_url=f"{pooling.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="toy", input=["abc", "abcde"])
        assert [each.embedding for each in answer.data] == [unit(3, 1, 2, 2), unit(5, 1, 2, 2)]
        assert [each.index for each in answer.data] == [0, 1]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (8, 8)
        floats = client.embeddings.create(model="toy", input=[5, 6], encoding_format="float", dimensions=2)
        assert [each.embedding for each in floats.data] == [unit(2, 1)]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("abc", [3]), ([7, 8], [2]), ([[7, 8], [9]], [2, 1]), (["a", [7, 8, 9]], [1, 3])],
    ids=["text", "ids", "lists of ids", "both"],
)
def test_inputs(given: Any, sizes: list[int], pooling: Server) -> None:
    reply = pooling.ask("POST", E, {"input": given, "use_activation": False})
    assert reply.status == 200, reply.json
    assert [each["embedding"][0] for each in reply.json["data"]] == sizes
    assert reply.json["usage"]["prompt_tokens"] == sum(sizes)


def test_conversation(pooling: Server) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert pooling.ask("POST", E, {"messages": messages}).status == 200
    prompt = pooling.engine.wait_for(Submit)[-1].prompt
    assert isinstance(prompt, ChatPrompt) and not prompt.add_generation_prompt


def test_bytes_in_base64(pooling: Server) -> None:
    reply = pooling.ask("POST", E, {"input": "ab", "encoding_format": "base64", "normalize": False})
    assert array("f", base64.b64decode(reply.json["data"][0]["embedding"])).tolist() == [2, 1, 2, 2]


def test_more_inputs_than_run_at_the_same_time(pooling: Server) -> None:
    reply = pooling.ask("POST", E, {"input": ["a" * (1 + i % 9) for i in range(600)], "normalize": False})
    assert [each["embedding"][0] for each in reply.json["data"]] == [1 + i % 9 for i in range(600)]


def test_parameters_reach_the_engine(pooling: Server) -> None:
    body = {"input": "abc", "cache_salt": "s", "truncate_prompt_tokens": 5, "add_special_tokens": False}
    reply = pooling.ask("POST", E, body)
    assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    submit = pooling.engine.wait_for(Submit)[-1]
    assert submit.prompt == TextPrompt("abc", add_special_tokens=False)
    params = submit.spec.params
    assert (params.truncate_prompt_tokens, params.truncation_side, params.reads_prefix_cache) == (
        5,
        "right",
        True,
    )
    assert submit.spec.pooling is PoolingType.LAST


def test_means_read_no_cached_prefix(tmp_path: Any) -> None:
    section = PoolingConfig(kind=PoolingType.MEAN, width=4, normalize=False)
    server = Server(make_config(str(tmp_path), pooling=section), {})
    try:
        reply = server.ask("POST", E, {"input": "abc"})
        assert reply.json["data"][0]["embedding"] == [3, 1, 2, 2]
        assert not server.engine.wait_for(Submit)[-1].spec.params.reads_prefix_cache
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(path: str, pooling: Server) -> None:
    reply = pooling.ask("POST", path, {"text_1": "abc", "text_2": ["abc", "a"]})
    assert reply.status == 200, reply.json
    expected = 12 / math.hypot(3, 1, 2, 2) / math.hypot(1, 1, 2, 2)
    assert [each["score"] for each in reply.json["data"]] == pytest.approx([1, expected])
    pairs = pooling.ask("POST", path, {"queries": ["abc", "a"], "documents": ["a", "a"]})
    assert [each["score"] for each in pairs.json["data"]] == pytest.approx([expected, 1])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_of_documents(path: str, pooling: Server) -> None:
    documents = ["a", {"text": "abcdefgh"}, "abc"]
    reply = pooling.ask("POST", path, {"query": "abcd", "documents": documents})
    assert reply.status == 200, reply.json
    results = reply.json["results"]
    assert [each["index"] for each in results] == [2, 1, 0]
    assert [each["document"]["text"] for each in results] == ["abc", "abcdefgh", "a"]
    assert results[0]["relevance_score"] > results[1]["relevance_score"]
    body = {"query": "abcd", "documents": documents, "top_n": 1, "return_documents": False}
    [only] = pooling.ask("POST", path, body).json["results"]
    assert only["index"] == 2 and "document" not in only


def test_vector_that_is_not_finite() -> None:
    for wrong in (math.nan, math.inf):
        with pytest.raises(RequestError, match="not finite"):
            vector_of(array("f", [1, wrong]).tobytes(), normalize=True)
    assert vector_of(array("f", [0, 0]).tobytes(), normalize=True).tolist() == [0, 0]


CASES: list[tuple[str, Any, int, str | None, list[str]]] = [
    (E, {}, 400, "input", ["input is missing"]),
    (E, {"input": []}, 400, "input", ["[]"]),
    (E, {"input": ["a"] * 4097}, 400, "n", ["4097", "at most 4096"]),
    (E, {"input": [1, "a"]}, 400, "input", ["mixes"]),
    (E, {"input": [[]]}, 400, "input", ["empty list"]),
    (E, {"input": [1000]}, 400, "input", ["1000", "between 0 and 999"]),
    (E, {"input": [1] * 257}, 400, "input", ["257 in the input", "256"]),
    (E, {"input": "a" * 251}, 400, "input", ["251"]),
    (E, {"input": "a", "messages": [{"role": "user", "content": "x"}]}, 400, "input", ["both"]),
    (E, {"messages": []}, 400, "messages", ["messages"]),
    (E, {"input": "a", "model": "other"}, 404, "model", ["other", "toy"]),
    (E, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format", ["'int8'", "base64"]),
    (E, {"input": "a", "dimensions": 0}, 400, "dimensions", ["0", "between 1 and 4"]),
    (E, {"input": "a", "dimensions": 5}, 400, "dimensions", ["5", "between 1 and 4"]),
    (E, {"input": "a", "embed_dtype": "float16"}, 400, "embed_dtype", ["float16"]),
    (E, {"input": "a", "endianness": "big"}, 400, "endianness", ["big"]),
    (E, {"input": "a", "stream": True}, 400, "stream", ["stream"]),
    (E, {"input": "a", "priority": 1}, 400, "priority", ["--scheduling-policy"]),
    (E, {"input": "a", "cache_salt": ""}, 400, "cache_salt", ["between 1 and 1024"]),
    (E, {"input": "a", "timeout": 0}, 400, "timeout", ["more than 0"]),
    (E, {"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", ["at least 1"]),
    (E, {"input": "a", "truncation_side": "middle"}, 400, "truncation_side", ["middle", "left"]),
    (E, {"input": "a", "mm_processor_kwargs": {"a": 1}}, 400, "mm_processor_kwargs", ["images"]),
    ("/score", {"text_1": "a"}, 400, "text_2", ["text_2", "none of them"]),
    ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, 400, "text_1", ["text_1, queries"]),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, 400, "text_1", ["2 texts", "3"]),
    ("/score", {"text_1": "a", "text_2": []}, 400, "text_2", ["text_2", "at least one"]),
    ("/rerank", {"query": "a"}, 400, "documents", ["documents"]),
    ("/rerank", {"query": "a", "documents": []}, 400, "documents", ["[]"]),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n", ["-1"]),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), CASES)
def test_invalid_requests(
    path: str, body: Any, status: int, param: str | None, words: list[str], pooling: Server
) -> None:
    reply = pooling.ask("POST", path, body)
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error["message"]
    assert pooling.ask("POST", E, {"input": "a"}).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (E, {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_server_that_does_not_pool(path: str, body: Any, shared: Server) -> None:
    reply = shared.ask("POST", path, body)
    assert reply.status == 400
    assert "--runner pooling" in reply.json["error"]["message"]
    assert reply.json["error"]["param"] == "model"


def test_client_that_leaves(pooling: Server) -> None:
    """Its prompts are cancelled."""
    pooling.engine.held, body = True, b'{"input": ["abc", "abcde"]}'
    num_before = len([each for _, _, each in pooling.engine.sent if isinstance(each, Submit)])
    try:
        with socket.create_connection(("127.0.0.1", pooling.port)) as connection:
            head = f"POST {E} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            submits = pooling.engine.wait_for(Submit, num_before + 2)[-2:]
        cancelled = [each.request_ids for each in pooling.engine.wait_for(Cancel, 2)]
        assert sorted(cancelled) == sorted([each.request_id] for each in submits)
    finally:
        pooling.engine.held = False
