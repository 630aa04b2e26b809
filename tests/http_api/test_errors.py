"""Invalid requests: status, error fields and message, and a following request that succeeds."""

import http.client
import json
import socket
from typing import Any

import pytest

from quintet.wire.messages import Submit, TextPrompt

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
NESTED: dict[str, object] = {}
for _ in range(65):
    NESTED = {"items": NESTED}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

CASES: list[tuple[str, Any, int, str | None, list[str]]] = [
    (C, b"{", 400, None, ["not valid JSON"]),
    (C, b"", 400, None, ["empty"]),
    (C, b"[1]", 400, None, ["[1]", "JSON object"]),
    (C, b'{"prompt":"\xff"}', 400, None, ["not valid JSON"]),
    (C, b"[" * 100_000, 400, None, ["JSON"]),
    (C, {}, 400, "prompt", ["prompt", "missing"]),
    (C, {"prompt": None}, 400, "prompt", ["prompt"]),
    (C, {"prompt": []}, 400, "prompt", ["[]"]),
    (C, {"prompt": {"a": 1}}, 400, "prompt", ['{"a":1}']),
    (C, {"prompt": [1, "a"]}, 400, "prompt", ["mixes"]),
    (C, {"prompt": [[]]}, 400, "prompt", ["empty list"]),
    (C, {"prompt": [5, 1000]}, 400, "prompt", ["1000", "between 0 and 999"]),
    (C, {"prompt": [[-1]]}, 400, "prompt", ["-1", "between 0 and 999"]),
    (C, {"prompt": "x", "temperature": "hot"}, 400, "temperature", ['"hot"', "float"]),
    (C, {"prompt": "x", "temperature": 2.5}, 400, "temperature", ["2.5", "between 0 and 2"]),
    (C, {"prompt": "x", "top_p": 0}, 400, "top_p", ["0", "at most 1"]),
    (C, {"prompt": "x", "top_k": -2}, 400, "top_k", ["-2"]),
    (C, {"prompt": "x", "min_p": 1.5}, 400, "min_p", ["1.5", "between 0 and 1"]),
    (C, {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty", ["between -2 and 2"]),
    (C, {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty", ["greater than 0"]),
    (C, {"prompt": "x", "n": 0}, 400, "n", ["0", "between 1 and"]),
    (C, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n", ["temperature is 0"]),
    (C, {"prompt": "x", "n": 1.5}, 400, "n", ["1.5", "int"]),
    (C, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", ["at least 1"]),
    (C, {"prompt": "x", "max_tokens": True}, 400, "max_tokens", ["true", "int"]),
    (C, {"prompt": "x", "min_tokens": 20}, 400, "min_tokens", ["at most max_tokens, which is 16"]),
    (C, {"prompt": "x", "seed": 1 << 70}, 400, "seed", ["64-bit"]),
    (C, {"prompt": "x", "top_k": 1 << 64}, 400, "top_k", ["at most 2147483647"]),
    (C, {"prompt": "x", "max_tokens": 1 << 64}, 400, "max_tokens", ["at most 2147483647"]),
    (C, {"prompt": "x", "priority": 1 << 64}, 400, "priority", ["64-bit"]),
    (C, {"prompt": "x", "n": 16000}, 400, "n", ["16000", "at most 4096"]),
    (H, {"messages": USER, "n": 5000}, 400, "n", ["5000", "at most 4096"]),
    (C, {"prompt": "x", "stop": [1]}, 400, "stop", ["stop[0] is 1"]),
    (C, {"prompt": "x", "stop": [""]}, 400, "stop", ["non-empty"]),
    (C, {"prompt": "x", "stop_token_ids": [1000]}, 400, "stop_token_ids", ["999"]),
    (C, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", ["'a'", "token ids"]),
    (C, {"prompt": "x", "logit_bias": {"1": "a"}}, 400, "logit_bias", ["float"]),
    (C, {"prompt": "x", "logit_bias": {"5000": 1}}, 400, "logit_bias", ["5000", "999"]),
    (C, {"prompt": "x", "logprobs": 21}, 400, "logprobs", ["between 0 and 20"]),
    (C, {"prompt": "x", "logprobs": True}, 400, "logprobs", ["true", "int"]),
    (C, {"prompt": "x", "cache_salt": ""}, 400, "cache_salt", ["between 1 and 1024"]),
    (C, {"prompt": "x", "request_id": "r" * 257}, 400, "request_id", ["'rrr", "1 to 256 printable ASCII"]),
    (C, {"prompt": "x", "stream": True, "request_id": "a b"}, 400, "request_id", ["'a b'", "without spaces"]),
    (H, {"messages": USER, "n": 128, "request_id": "r" * 2_000_000}, 400, "request_id", ["1 to 256 printable"]),
    (H, {"messages": [{"role": "r" * 257}], "add_generation_prompt": False}, 400, "messages", ["[0].role", "256"]),
    (C, {"prompt": "x", "truncation_side": "top"}, 400, "truncation_side", ["'left' or 'right'"]),
    (C, {"prompt": "x", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", ["-2"]),
    (C, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", ["stream"]),
    (C, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", ["streamed"]),
    (C, {"prompt": "x", "stream": "yes"}, 400, "stream", ["bool"]),
    (C, {"prompt": "x", "timeout": 0}, 400, "timeout", ["timeout is 0.0", "more than 0"]),
    (H, {"messages": USER, "timeout": -1.5}, 400, "timeout", ["timeout is -1.5"]),
    (C, {"prompt": "x", "timeout": 1e7}, 400, "timeout", ["at most 1000000 seconds"]),
    (C, {"prompt": "x", "timeout": "soon"}, 400, "timeout", ['"soon"', "float"]),
    (C, {"prompt": "x", "stream": True, "stream_options": {"include_usage": 3}}, 400, "stream_options.include_usage", []),
    (C, {"prompt": [1, 2], "suffix": "y"}, 400, "suffix", ["send the prompt as text"]),
    (C, {"prompt": "x", "suffix": "y", "echo": True}, 400, "echo", ["cannot be combined with"]),
    (C, {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format", ["'xml'"]),
    (C, {"prompt": "x" * 251}, 400, "prompt", ["251", "at most 256"]),
    (C, {"prompt": "x", "model": "gpt-9"}, 404, "model", ["The model `gpt-9` does not exist", "`toy`"]),
    (C, {"prompt": "x", "use_beam_search": True, "n": 33}, 400, "n", ["between 1 and 32"]),
    (C, {"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, 400, "best_of", ["at least n"]),
    (C, {"prompt": "x", "use_beam_search": True, "stop": ["a"]}, 400, "stop", ["has no effect"]),
    (C, {"prompt": "x", "use_beam_search": True, "logit_bias": {"1": 1}}, 400, "logit_bias", ["has no effect"]),
    (C, {"prompt": "x", "use_beam_search": True, "repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, 400,
     "repetition_detection", ["has no effect"]),
    (C, {"prompt": "x", "use_beam_search": True, "guided_regex": "a"}, 400, "guided_regex", ["has no effect"]),
    (C, {"prompt": "x", "use_beam_search": True, "early_stopping": 3}, 400, "early_stopping", ["'never'"]),
    (C, {"prompt": "x", "use_beam_search": True, "length_penalty": 99}, 400, "length_penalty", ["between -10 and 10"]),
    (H, {"messages": USER, "use_beam_search": True, "response_format": {"type": "json_object"}}, 400, "response_format",
     ["has no effect"]),
    (C, {"prompt": "x", "prompt_embeds": "AAAA"}, 400, "prompt_embeds", ["--enable-prompt-embeds"]),
    (C, {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs", ["nothing", "exactly one of"]),
    (C, {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", ["regex and choice"]),
    (C, {"prompt": "x", "structured_outputs": {"json": "{"}}, 400, "structured_outputs", ["not JSON"]),
    (C, {"prompt": "x", "structured_outputs": {"json": 5}}, 400, "structured_outputs", ["$.json"]),
    (C, {"prompt": "x", "structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, 400, "structured_outputs",
     ["JSON only"]),
    (C, {"prompt": "x", "guided_json": [1]}, 400, "guided_json", ["guided_json"]),
    (C, {"prompt": "x", "guided_json": {"a": "x" * 200_000}}, 400, "guided_json", ["at most 131072"]),
    (C, {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, 400, "structured_outputs", ["one of them"]),
    (C, {"prompt": "x", "guided_choice": []}, 400, "guided_choice", ["at least one"]),
    (C, {"prompt": "x", "guided_choice": ["a", ""]}, 400, "guided_choice", ["empty"]),
    (C, {"prompt": "x", "guided_choice": "a"}, 400, "guided_choice", ["choice"]),
    (H, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format", ["json_schema is missing"]),
    (H, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400, "response_format",
     ["schema"]),
    (H, {"messages": USER, "guided_json": NESTED}, 400, "guided_json", ["nested deeper than 64"]),
    (C, {"prompt": "x", "kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params", []),
    (C, {"prompt": "x", "return_token_offsets": True}, 400, "return_token_offsets", []),
    (H, {"messages": USER, "moderation": {"model": "omni-moderation-latest"}}, 400, "moderation", []),
    (C, {"prompt": "x", "thinking_token_budget": -5}, 400, "thinking_token_budget", ["-1 for no limit"]),
    (C, {"prompt": "x", "stream": True, "stream_interval": 0}, 400, "stream_interval", ["at least 1"]),
    (C, {"prompt": "x", "detokenize": False}, 400, "detokenize", ["return_token_ids"]),
    (C, {"prompt": "x", "best_of": 3, "stream": True}, 400, "best_of", ["stream is true"]),
    (C, {"prompt": "x", "best_of": 3, "n": 4}, 400, "best_of", ["at least n (4)"]),
    (C, {"prompt": "x", "best_of": 3, "temperature": 0}, 400, "best_of", ["1 when temperature is 0"]),
    (C, {"prompt": "x", "use_beam_search": True, "temperature": 9}, 400, "temperature", ["between 0 and 2"]),
    (C, {"use_beam_search": True}, 400, "prompt", ["missing"]),
    (H, {"messages": [], "mm_payload": {"a": 1}}, 400, "messages", ["at least one"]),
    (C, {"prompt": "x", "max_tokens": "0"}, 400, "max_tokens", ["at least 1"]),
    (C, {"prompt": "x", "max_tokens": "5", "top_k": "many"}, 400, "top_k", ['"many"', "int"]),
    (C, {"prompt": "x", "temperature": "nan"}, 400, "temperature", ["between 0 and 2"]),
    (C, {"prompt": "x", "max_tokens": "9" * 5000}, 400, "max_tokens", ["999"]),
    (C, {"prompt": "x", "logit_bias": {"１": 1}}, 400, "logit_bias", ["token ids"]),
    (C, {"prompt": "x", "logit_bias": {"1_0": 1}}, 400, "logit_bias", ["token ids"]),
    (C, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", ["..."]),
    (C, {"prompt": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", ["at least 1"]),
    (C, {"prompt": [1] * 257}, 400, "prompt", ["257 in the prompt", "This model's maximum context length is 256"]),
    (C, {"prompt": "x", "suffix": "y", "use_beam_search": True}, 400, "use_beam_search", ["cannot be combined with"]),
    (C, {"prompt": "x", "model": "g" * 1000}, 404, "model", ["does not exist"]),
    (C, b'{"prompt":"\\ud800"}', 400, None, ["not valid JSON", "pairs"]),
    (C, b'{"prompt":"\\ud80"}', 400, None, ["not valid JSON"]),
    (C, b'{"max_tokens":"5","prompt":"', 400, None, ["not valid JSON"]),
    (H, b'{"messages":[{"role":"user","content":"\xff"}]}', 400, None, ["not valid JSON"]),
    (H, b'{"messages":[{"role":"user","content":"x","name":"\xff"}]}', 400, None, ["not valid JSON"]),
    (H, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None, ["not valid JSON"]),
    (H, b'{"messages":[{"role":"user"}],"documents":["\xff"]}', 400, "documents", ["not valid JSON"]),
    (H, b'{"messages":[{"role":"user"}],"chat_template_kwargs":{"a":"\xff"}}', 400, "chat_template_kwargs", ["not valid"]),
    (H, {"messages": USER, "functions": [{"name": "f"}]}, 400, "functions", ["`tools`"]),
    (H, {"messages": USER, "function_call": "auto"}, 400, "function_call", ["`tools`"]),
    (H, {}, 400, "messages", ["missing"]),
    (H, {"messages": []}, 400, "messages", ["at least one"]),
    (H, {"messages": "hi"}, 400, "messages", ['"hi"', "array"]),
    (H, {"messages": [{"content": "x"}]}, 400, "messages[0].role", ["missing"]),
    (H, {"messages": [{"role": 1}]}, 400, "messages", ["messages[0].role is 1", "str"]),
    (H, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", ["messages[0].content is 5"]),
    (C, {"prompt": "x", "logprob_token_ids": []}, 400, "logprob_token_ids", ["is []"]),
    (C, {"prompt": "x", "logprob_token_ids": [1]}, 400, "logprob_token_ids", ["without logprobs"]),
    (H, {"messages": USER, "logprob_token_ids": [1]}, 400, "logprob_token_ids", ["without logprobs"]),
    (H, {"messages": USER, "logprob_token_ids": [], "logprobs": True}, 400, "logprob_token_ids", ["is []"]),
    (H, {"messages": USER, "prompt_token_ids": []}, 400, "prompt_token_ids", ["empty list"]),
    (H, {"messages": USER, "prompt_token_ids": [1000]}, 400, "prompt_token_ids", ["1000"]),
    (H, {"messages": USER, "prompt_token_ids": [1] * 257}, 400, "prompt_token_ids", ["maximum context length is 256"]),
    (H, {"messages": USER, "vllm_xargs": {"a": None}}, 400, "vllm_xargs", ["vllm_xargs", "null"]),
    (H, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", ["logprobs is not true"]),
    (H, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", ["between 0 and 20"]),
    (H, {"messages": USER, "logprobs": 3}, 400, "logprobs", ["bool"]),
    (H, {"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens", ["at least 1"]),
    (H, {"messages": USER, "tools": "f"}, 400, "tools", ["array"]),
    (H, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools", ["tools[0].name is missing"]),
    (H, {"messages": USER, "tool_choice": "auto"}, 400, "tool_choice", ["tools"]),
    (H, {"messages": USER, "tools": TOOLS, "tool_choice": "maybe"}, 400, "tool_choice", ["'maybe'"]),
    (H, {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function"}}, 400, "tool_choice", ['{"name": …}']),
    (H, {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}}, 400,
     "tool_choice", ["'absent'", "one of the tools"]),
    (H, {"messages": USER, "tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, 400,
     "tool_choice", ["another output format"]),
    (H, {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, 400,
     "tools", ["'a b'"]),
    (H, {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message", []),
    (H, {"messages": USER, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs", ["object"]),
    (H, {"messages": USER, "chat_template": "{% for x in y %}"}, 400, "chat_template", ["--trust-request-chat-template"]),
    (H, {"messages": USER, "chat_template": "typo"}, 400, "chat_template", ["'typo'", "(default, tool_use)"]),
    ("/tokenize", {"messages": USER, "chat_template": "typo"}, 400, "chat_template", ["'typo'"]),
    (H, {"messages": USER, "reasoning_effort": "huge"}, 400, "reasoning_effort", ["'huge'", "medium"]),
    (H, {"messages": USER, "mm_payload": {"a": 1}}, 400, "mm_payload", ["other than text"]),
    ("/tokenize", {}, 400, "prompt", ["both missing"]),
    ("/tokenize", {"prompt": 5}, 400, "prompt", ["5"]),
    ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model", ["gpt-9"]),
    ("/detokenize", {}, 400, "tokens", ["missing"]),
    ("/detokenize", {"tokens": [5000]}, 400, "tokens", ["5000", "999"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), CASES)
def test_an_invalid_request_has_an_error_and_the_next_request_succeeds(
    shared: Any, path: str, body: Any, status: int, param: str | None, words: list[str]
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    try:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, sent, {"content-type": "application/json"})
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status == status, error
        assert error["code"] in {str(status), "context_length_exceeded"}
        assert error["param"] == param, error
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 400
        for word in words:
            assert word in error["message"]
        connection.request("POST", C, json.dumps({"prompt": "x", "max_tokens": 1}).encode())
        good = connection.getresponse()
        assert json.loads(good.read())["choices"][0]["text"] == " t0"
    finally:
        connection.close()


def test_a_chat_template_is_selected_by_name(serve: Any) -> None:
    server = serve()
    assert server.ask("POST", H, {"messages": USER, "chat_template": "tool_use"}).status == 200
    assert server.engine.wait_for(Submit)[0].prompt.chat_template == "tool_use"


def test_streaming_does_not_change_the_status_of_an_error(shared: Any) -> None:
    reply = shared.ask("POST", C, {"prompt": "x" * 251, "stream": True})
    assert reply.status == 400
    assert reply.json["error"]["type"] == "BadRequestError"
    assert reply.headers["content-type"] == "application/json"


def test_neutral_values_and_unknown_fields_are_accepted(shared: Any) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "guided_json": None,
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "suffix": "",
        "kv_transfer_params": None,
        "stream_options": None,
        "logit_bias": None,
        "seed": -1,
        "unknown_field": [1],
    }
    assert shared.ask("POST", C, body).status == 200


def test_a_suffix_is_submitted_with_its_prompt(shared: Any) -> None:
    assert shared.ask("POST", C, {"prompt": ["a", "b"], "suffix": "z", "max_tokens": 1}).status == 200
    prompts = [submit.prompt for submit in shared.engine.wait_for(Submit)[-2:]]
    assert prompts == [TextPrompt("a", suffix="z"), TextPrompt("b", suffix="z")]


def test_numbers_and_booleans_may_be_strings(serve: Any) -> None:
    server = serve()
    sent = {
        "max_tokens": "5",
        "temperature": "0.5",
        "stop_token_ids": ["7"],
        "logit_bias": {"3": "1.5"},
        "ignore_eos": "true",
    }
    for path, more in ((C, {"prompt": "5"}), (H, {"messages": USER, "logprobs": "False", "seed": "-3"})):
        assert server.ask("POST", path, {**sent, **more}).status == 200
        params = server.engine.wait_for(Submit)[-1].spec.params
        assert (params.max_tokens, params.temperature, params.stop_token_ids) == (5, 0.5, [7])
        assert (params.logit_bias, params.ignore_eos) == ({3: 1.5}, True)
    assert params.seed == -3 and params.logprobs is None
    assert server.engine.wait_for(Submit)[0].prompt.text == "5"


def test_paths_and_methods(shared: Any) -> None:
    missing = shared.ask("GET", "/v2/nothing")
    assert (missing.status, missing.json["error"]["type"]) == (404, "NotFoundError")
    wrong = shared.ask("GET", C)
    assert (wrong.status, wrong.json["error"]["type"]) == (405, "MethodNotAllowedError")
    assert wrong.headers["allow"] == "POST"
    assert shared.ask("DELETE", "/v1/models").status == 405
    assert shared.ask("GET", "/v1/models/not/there").status == 404


def test_content_types(shared: Any) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for good in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
        assert shared.ask("POST", C, body, {"content-type": good}).status == 200
    wrong = shared.ask("POST", C, body, {"content-type": "text/plain"})
    assert (wrong.status, wrong.json["error"]["code"]) == (415, "415")
    assert "'text/plain'" in wrong.json["error"]["message"]


def test_an_internal_error_is_a_500_and_the_next_request_succeeds(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shared.service.admission, "check", lambda *_: 1 // 0)
        broken = shared.ask("POST", C, {"prompt": "x"}, {"x-request-id": "r-1"})
    assert broken.status == 500
    assert broken.json["error"]["type"] == "InternalServerError"
    assert "r-1" in broken.json["error"]["message"]
    assert "ZeroDivision" not in broken.json["error"]["message"]
    assert shared.ask("POST", C, {"prompt": "x", "max_tokens": 1}).status == 200


def test_priority_needs_the_priority_policy(serve: Any) -> None:
    server = serve()
    refused = server.ask("POST", C, {"prompt": "x", "priority": 1})
    assert (refused.status, refused.json["error"]["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in refused.json["error"]["message"]
    assert server.ask("POST", C, {"prompt": "x", "priority": 0, "max_tokens": 1}).status == 200


def send_partial_body(server: Any, sent: bytes) -> tuple[socket.socket, bytes]:
    """Send part of a body. Return the open connection and everything the server sends."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + sent)
    with connection.makefile("rb") as reader:
        return connection, reader.read()


def test_a_stalled_body_is_a_408_and_closes_the_connection(serve: Any) -> None:
    server = serve()
    server.service.bodies.progress_s = 0.05
    connection, answer = send_partial_body(server, b'{"prompt":')
    connection.close()
    assert b" 408 " in answer
    assert b"stopped after 10 bytes" in answer
    assert server.service.bodies.num_open_bytes == 0


def test_unfinished_bodies_are_bounded_in_bytes(serve: Any) -> None:
    server = serve()
    server.service.bodies.max_open_bytes = 9
    connection, answer = send_partial_body(server, b'{"prompt":')
    connection.close()
    assert b" 503 " in answer
    assert b"retry-after" in answer
    assert server.service.bodies.num_open_bytes == 0
    assert server.ask("POST", C, {"prompt": "x" * 200, "max_tokens": 1}).status == 200


def test_the_slowest_body_is_rejected_when_memory_is_full(serve: Any) -> None:
    server = serve()
    server.service.bodies.max_open_bytes = 25
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 20\r\n\r\n"
    whole = b'{"prompt": "abcdef"}'
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]

    def send(client: socket.socket, piece: bytes, held: int) -> None:
        client.sendall(piece)
        while server.call(lambda: server.service.bodies.num_open_bytes) != held:
            pass

    send(clients[0], head + whole[:10], 10)
    send(clients[1], head + whole[:10], 20)
    send(clients[0], whole[10:11], 21)
    clients[2].sendall(head + whole[:10])
    answers = {}
    with clients[1].makefile("rb") as reader:
        answers[1] = reader.read()
    for index, rest in ((0, whole[11:]), (2, whole[10:])):
        clients[index].sendall(rest)
        with clients[index].makefile("rb") as reader:
            answers[index] = reader.read()
    for client in clients:
        client.close()
    assert [answers[index].split()[1] for index in range(3)] == [b"200", b"503", b"200"]
    assert server.service.bodies.num_open_bytes == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_only_an_explicit_max_tokens_of_completions_can_be_too_large(
    shared: Any, path: str, body: dict[str, Any]
) -> None:
    """Agents send limits for a model's whole context: Zed, opencode, Hermes."""
    is_chat = "messages" in body
    for limits in ({}, {"max_tokens": None}, {"max_tokens": 5}, {"max_completion_tokens": 5}):
        assert shared.ask("POST", path, {**body, **limits}).status == 200
        is_clamped = is_chat or limits.get("max_tokens") is None
        assert shared.engine.wait_for(Submit)[-1].clamp_max_tokens is is_clamped
    assert shared.ask("POST", path, {**body, "max_tokens": 5, "truncate_prompt_tokens": -1}).status == 200
    assert not shared.engine.wait_for(Submit)[-1].clamp_max_tokens, "truncation leaves room for the output"


def test_invocations_accepts_chat_and_completion_bodies(shared: Any) -> None:
    chat = shared.ask(
        "POST", "/invocations", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    )
    assert chat.json["object"] == "chat.completion"
    text = shared.ask("POST", "/invocations", {"prompt": "x", "max_tokens": 1})
    assert text.json["object"] == "text_completion"
    neither = shared.ask("POST", "/invocations", {"inputs": "x"})
    assert (
        neither.status == 400 and "messages and prompt are both missing" in neither.json["error"]["message"]
    )


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", {"token_ids": []}, "token_ids holds an empty list"),
        ("/inference/v1/generate", {"token_ids": [1000]}, "token_ids holds the token id 1000"),
        ("/inference/v1/generate", {"token_ids": [1] * 300}, "300 in the token_ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": 5},
            "sampling_params must be an object",
        ),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p is 2"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"image": 1}}, "input other than text"),
        ("/v1/chat/completions/batch", {"messages": []}, "at least one conversation"),
        ("/v1/chat/completions/batch", {"messages": [[]]}, "at least one message"),
        ("/v1/chat/completions/batch", {"messages": [{"role": "user"}]}, "must be array"),
        ("/v1/chat/completions/batch", {"messages": [], "stream": True}, "cannot be streamed"),
        ("/v1/completions/render", {"prompt": "x" * 250, "max_tokens": 9}, "250 in the prompt"),
        (
            "/v1/chat/completions/derender",
            {"generate_response": {"choices": [{"token_ids": [1000]}]}},
            "token_ids holds the token id 1000",
        ),
        (
            "/v1/chat/completions/derender",
            {"generate_response": {"choices": [{"token_ids": [1], "finish_reason": "bored"}]}},
            "finish_reason is 'bored'",
        ),
        (
            "/v1/chat/completions/derender",
            {"generate_response": {"choices": [{}] * 257}},
            "send at most 256",
        ),
        (
            "/v1/completions/derender",
            {"generate_responses": [{"choices": []}], "prompt_tokens": [1, 2]},
            "prompt_tokens 2 numbers",
        ),
    ],
)
def test_invalid_requests_at_minor_endpoints_are_400(
    shared: Any, path: str, body: dict[str, Any], words: str
) -> None:
    answer = shared.ask("POST", path, body)
    assert answer.status == 400 and words in answer.json["error"]["message"], answer.json
