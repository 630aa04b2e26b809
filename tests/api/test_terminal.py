"""``quintet chat``, ``complete`` and ``bench`` on the command line, with a fake server."""

from __future__ import annotations

import json
import os
import pty
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.deploy.cli.chat import Chat
from quintet.deploy.tools.load_client.talk import Client
from tests.api.toy_server import ToyServer, chunked, frames, sized, toy_server
from tests.deploy.supervisor.supervised import is_readable

MODELS = json.dumps({"data": [{"id": "toy"}]}).encode()
USAGE = '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}'


class ScriptedServer:
    """Scripted answers: echoes the last message; ``hang`` streams one word and stops."""

    def __call__(self, path: str, body: bytes, number: int) -> list[bytes] | None:
        if path == "/v1/models":
            return [sized("200 OK", MODELS)]
        if path == "/tokenize":
            return [
                sized("200 OK", json.dumps({"count": 2 * len(json.loads(body)["prompt"].split())}).encode())
            ]
        received = json.loads(body)
        if received.get("max_tokens") == 999:
            return [sized("400 Bad Request", b'{"error":{"message":"max_tokens is 999; it must be less"}}')]
        if path == "/v1/completions":
            pieces = [f'{{"choices":[{{"text":"{text}"}}]}}' for text in (" one", " two")]
            return [chunked(frames(*pieces, USAGE, "[DONE]"))]
        message = received["messages"][-1]["content"]
        words = [f"[{len(received['messages'])}] ", f"you said {message.strip()}"]
        pieces = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words]
        if message == "reason":
            deltas = [
                {"reasoning": "let me"},
                {"reasoning_content": " see", "content": "It"},
                {"content": " is"},
            ]
            pieces = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        if message == "hang":
            return [chunked(frames(pieces[0])).removesuffix(b"0\r\n\r\n")]
        return [chunked(frames(*pieces, USAGE, "[DONE]"))]


@pytest.fixture
def server() -> Iterator[ToyServer]:
    with toy_server(ScriptedServer()) as server:
        yield server


def quintet(*words: str | bytes, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quintet.deploy.cli.main", *words],
        input=stdin.decode(errors="surrogateescape") if isinstance(stdin, bytes) else stdin,
        errors="surrogateescape", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_complete_prints_the_continuation(server: ToyServer) -> None:
    ended = quintet("complete", "count:", "--url", server.url, "--temperature", "0", "--stop", "x")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, " one two", "")
    body = json.loads(server.requests[-1][1])
    assert body == {
        "max_tokens": 128, "temperature": 0.0, "stop": ["x"], "model": "toy", "prompt": "count:", "stream": True,
    }  # fmt: skip


def test_complete_reads_a_pipe_and_echoes(server: ToyServer) -> None:
    ended = quintet("complete", "--echo", "--url", server.url, stdin="from a pipe")
    assert ended.stdout == "from a pipe one two"


def test_errors_are_messages(server: ToyServer) -> None:
    refused = quintet("complete", "x", "--url", server.url, "--max-tokens", "999")
    assert refused.returncode == 1 and "max_tokens is 999; it must be less (HTTP 400)" in refused.stderr
    unreachable = quintet("chat", "--url", "http://127.0.0.1:9", stdin="x")
    assert unreachable.returncode == 1 and "Start one with `quintet serve`" in unreachable.stderr
    assert "Traceback" not in refused.stderr + unreachable.stderr
    assert "http://127.0.0.1:8000" in quintet("complete", "x", "--url", "ftp://y").stderr


@pytest.mark.parametrize(
    ("listed", "words", "sent"),
    [
        ({}, (), {"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024}),
        (
            {"generation_defaults": {}},
            (),
            {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05, "max_tokens": 1024},
        ),
        ({"generation_defaults": {"temperature": 0.2, "top_p": 1}}, (), {"min_p": 0.05, "max_tokens": 1024}),
        (
            {},
            ("--temperature", "0", "--top-p", "1", "--max-tokens", "5"),
            {"temperature": 0.0, "top_p": 1.0, "max_tokens": 5},
        ),
    ],
    ids=["another server", "a silent model", "a model that says", "the user says"],
)
def test_chat_sampling_defaults(
    listed: dict[str, object], words: tuple[str, ...], sent: dict[str, object]
) -> None:
    toy = ScriptedServer()
    models = sized("200 OK", json.dumps({"data": [{"id": "toy", **listed}]}).encode())
    with toy_server(
        lambda path, body, number: [models] if path == "/v1/models" else toy(path, body, number)
    ) as server:
        assert quintet("chat", "--url", server.url, *words, stdin="x").returncode == 0
        body = json.loads(server.requests[-1][1])
    sampling_fields = ("temperature", "top_p", "min_p", "max_tokens")
    assert {name: body[name] for name in sampling_fields if name in body} == sent


def test_chat_answers_a_pipe_once(server: ToyServer) -> None:
    ended = quintet("chat", "--url", server.url, "--system", "be kind", stdin="two\nlines")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "[2] you said two\nlines\n"


def test_chat_history_has_no_reasoning(server: ToyServer, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(Client.of(server.url, None), {"model": "toy"}, None)
    chat.send("reason")
    assert capsys.readouterr() == ("It is\n", "let me see\n\n")
    chat.send("again")
    messages = json.loads(server.requests[-1][1])["messages"]
    assert [message["content"] for message in messages] == ["reason", "It is", "again"]


def test_undecodable_bytes_are_replaced(server: ToyServer) -> None:
    chat = quintet("chat", "--url", server.url, "--system", b"na\xefve", stdin=b"caf\xe9")
    assert (chat.returncode, chat.stdout, chat.stderr) == (0, "[2] you said caf\ufffd\n", "")
    assert json.loads(server.requests[-1][1])["messages"][0]["content"] == "na\ufffdve"
    complete = quintet("complete", "--echo", b"caf\xe9", "--url", server.url)
    assert (complete.returncode, complete.stdout) == (0, "caf\ufffd one two")


def test_rejected_certificate_is_named(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with toy_server(ScriptedServer(), context) as server:
        ended = quintet("chat", "--url", server.url, stdin="x")
    assert ended.returncode == 1 and "was not accepted: self-signed certificate" in ended.stderr


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._main, child = pty.openpty()
        # Background jobs of a shell ignore Ctrl-C, and so would their children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quintet.deploy.cli.main", *words], stdin=child, stdout=child, stderr=child,
            start_new_session=True,
        )  # fmt: skip
        signal.signal(signal.SIGINT, before)
        os.close(child)
        self._seen = ""

    def expect(self, words: str) -> None:
        """Read until ``words`` appear, and drop the output up to their end."""
        deadline = time.monotonic() + 20
        while words not in self._seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0 and is_readable(self._main, left_s), f"{words!r} not in {self._seen!r}"
            self._seen += os.read(self._main, 4096).decode()
        self._seen = self._seen.partition(words)[2]

    def type(self, line: str) -> None:
        os.write(self._main, f"{line}\n".encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


def test_chat_in_a_terminal(server: ToyServer) -> None:
    terminal = Terminal("chat", "--url", server.url)
    try:
        terminal.expect("toy at")
        terminal.expect("> ")
        terminal.type("hello")
        terminal.expect("[1] you said hello")
        terminal.expect("(first token ")
        terminal.expect(" tokens/s)")
        terminal.expect("> ")
        terminal.type("again")
        terminal.expect("[3] you said again")
        terminal.type("hang")
        terminal.expect("[5] ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.expect("(stopped)")
        terminal.type("still there?")
        terminal.expect("[7] you said still there?")
        terminal.type("/reset")
        terminal.expect("(conversation cleared)")
        terminal.type("/system be brief")
        terminal.expect("new conversation")
        terminal.type("hello")
        terminal.expect("[2] you said hello")
        terminal.type("/what")
        terminal.expect("/reset")
        terminal.type("/quit")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()


def test_bench_serve_measures_and_writes_json(server: ToyServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ended = quintet(
        "bench", "serve", "--base-url", server.url, "--num-prompts", "20", "--concurrency", "4", "--input-len", "16",
        "--warmup", "3", "--api-key", "secret", "--json", str(out), "--extra-body", '{"top_k": 3}',
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "20 of 20 completed" in ended.stdout and "time to first token" in ended.stdout
    report = json.loads(out.read_text())
    assert report["result"]["output_tokens"] == 40 and report["settings"]["model"] == "toy"
    assert "secret" not in out.read_text()
    completions = [json.loads(body) for path, body in server.requests if path == "/v1/completions"]
    assert len(completions) == 23 and completions[0]["top_k"] == 3
    assert all(len(body["prompt"].split()) == 8 for body in completions), (
        "two tokens a word, as /tokenize counts"
    )


@pytest.mark.parametrize("flag", ["--url", "--base-url"])
def test_every_client_accepts_both_url_flags(server: ToyServer, flag: str) -> None:
    assert quintet("complete", "x", flag, server.url).stdout == " one two"
    assert quintet("chat", flag, server.url, stdin="x").stdout == "[1] you said x\n"
    assert "2 of 2 completed" in quintet("bench", "serve", flag, server.url, "--num-prompts", "2").stdout


def test_bench_serve_errors(server: ToyServer) -> None:
    for words, expected in (
        (("--prompt-ids",), "requires --vocab-size"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--header", "nope"), "Name: value"),
        (("--input-len", "0"), "at least 1"),
        (("--json", "no-folder/out.json"), "create the folder no-folder first"),
    ):
        ended = quintet("bench", "serve", "--base-url", server.url, *words)
        assert ended.returncode == 2 and expected in ended.stderr
    unreachable = quintet("bench", "serve", "--base-url", "http://127.0.0.1:9")
    assert unreachable.returncode == 1 and "quintet serve" in unreachable.stderr


def test_bench_offline_counts_tokens(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ended = quintet(
        "bench", "offline", "--executor", "mock", "--num-prompts", "10", "--input-len", "8", "--output-len", "4",
        "--ignore-eos", "--json", str(out),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(out.read_text())
    assert (result["num_requests"], result["prompt_tokens"], result["output_tokens"]) == (10, 80, 40)


def test_bench_offline_with_the_embedded_model_and_errors(tmp_path: Path) -> None:
    small = (
        "bench",
        "offline",
        "--num-prompts",
        "4",
        "--input-len",
        "16",
        "--output-len",
        "8",
        "--threads",
        "1",
    )
    ended = quintet(*small, "--max-num-seqs", "4", "--max-model-len", "64", "--ignore-eos")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[5].split() == ["output_tokens", "32"]
    too_long = quintet(*small, "--executor", "mock", "--max-model-len", "20")
    assert too_long.returncode == 1 and too_long.stderr.startswith("quintet bench: This model's maximum")
    assert "Traceback" not in too_long.stderr


@pytest.mark.parametrize(
    "words", [["chat"], ["complete"], ["bench"], ["bench", "serve"], ["bench", "offline"]]
)
def test_help_has_examples(words: list[str]) -> None:
    ended = quintet(*words, "--help")
    assert ended.returncode == 0 and "quintet " in ended.stdout
    assert words == ["bench"] or "example" in ended.stdout
