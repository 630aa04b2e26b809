"""Random streamed requests, clients that resume their streams, and the comparison of two runs.

Two runs of the same requests must give the same bytes in spite of kills: `StreamResult` has everything that must be equal.
`random_requests` is seeded. Its requests have greedy and seeded sampling, several choices, stop strings, penalties,
log-probabilities and common prefixes, as chats and completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

WORDS = [
    "the",
    "library",
    "lends",
    "books",
    "and",
    "the",
    "reader",
    "returns",
    "them",
    "when",
    "the",
    "bell",
    "rings",
    "over",
    "every",
    "open",
    "door",
]
TIMEOUT_S = 600.0
PAUSE_S = 0.05
"""Time before a client reconnects."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Path and body of a streamed request."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class ChoiceResult:
    """One choice, assembled from its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_endings: int = 0


@dataclass(slots=True)
class StreamResult:
    """One response. `bytes_of` has what two runs must have in common."""

    status: int = 0
    choices: dict[int, ChoiceResult] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False
    """True after ``[DONE]``, or the last event of another API."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events of the Responses API, without run-specific values; successive deltas are joined."""
    numbers: list[int] = field(default_factory=list)
    """Their sequence numbers, in order of arrival."""
    names: dict[str, str] = field(default_factory=dict)
    """Replacements of run-specific ids, by id."""
    sent_s: float = 0.0
    """`time.perf_counter` when the request was first sent."""
    times_s: list[float] = field(default_factory=list)
    """Time of each event."""
    event_ids: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_sent: int = 0
    """Number of connections that sent the request itself, not a resumption."""

    @property
    def longest_wait_s(self) -> float:
        """Longest wait for an event, in seconds: since the previous event, or since the request for the first one."""
        return max((b - a for a, b in itertools.pairwise([self.sent_s, *self.times_s])), default=0.0)

    def bytes_of(self) -> str:
        """Return everything that must be equal in two runs: neither times nor the division into events."""
        choices = {
            index: (c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason, c.num_endings)
            for index, c in sorted(self.choices.items())
        }
        usage = {
            name: self.usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        is_unbroken = self.numbers == list(range(len(self.numbers)))
        return json.dumps([self.status, choices, usage, self.error, self.is_done, is_unbroken, self.events])

    def feed(self, event: dict[str, Any]) -> None:
        """Apply one event."""
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        if event.get("type", "").startswith("response."):
            self._feed_responses(event)
            return
        if "type" in event:
            self._feed_messages(event)
            return
        if event.get("usage"):
            self.usage = event["usage"]
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], ChoiceResult())
            delta = part.get("delta")
            choice.text += (delta.get("content") or "") if delta is not None else part["text"]
            choice.token_ids += part.get("token_ids") or []
            if part.get("logprobs"):
                choice.logprobs += _entries(part["logprobs"])
            if part.get("finish_reason"):
                choice.finish_reason, choice.stop_reason = part["finish_reason"], part.get("stop_reason")
                choice.num_endings += 1

    def _feed_messages(self, event: dict[str, Any]) -> None:
        """Apply an event of Anthropic's API."""
        choice = self.choices.setdefault(0, ChoiceResult())
        match event["type"]:
            case "message_start":
                usage = event["message"]["usage"]
                self.usage["prompt_tokens"] = usage["input_tokens"] + usage["cache_read_input_tokens"]
            case "content_block_delta":
                choice.text += event["delta"]["text"]
            case "message_delta":
                self.usage["completion_tokens"] = event["usage"]["output_tokens"]
                choice.finish_reason = event["delta"]["stop_reason"]
                choice.stop_reason = event["delta"]["stop_sequence"]
                choice.num_endings += 1
            case "message_stop":
                self.is_done = True

    def _feed_responses(self, event: dict[str, Any]) -> None:
        """Apply an event of the Responses API."""
        self.numbers.append(event.pop("sequence_number"))
        response = event.get("response", {})
        if "id" in response:
            self.names.setdefault(response["id"].partition("_")[2], "own")
            self.is_done = response["status"] != "in_progress"
            self.error = json.dumps(response["error"]) if response["error"] else ""
            response |= {"created_at": 0, "completed_at": 0}
            if response.get("usage"):
                response["usage"].pop("input_tokens_details")
        if "call_id" in event.get("item", {}):
            self.names.setdefault(event["item"]["call_id"], f"call {len(self.names)}")
        text = json.dumps(event)
        for name, ours in self.names.items():
            text = text.replace(name, ours)
        event = json.loads(text)
        last = self.events[-1] if self.events else {}
        if "delta" in event and all(event[name] == last.get(name) for name in ("type", "item_id")):
            last["delta"] += event["delta"]
        else:
            self.events.append(event)


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"] or ())
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(row) for row in zip(*(logprobs[name] or () for name in columns), strict=False)]


def random_requests(
    seed: int, size: int, max_tokens: tuple[int, int] = (60, 160), *, plain: bool = False
) -> list[StreamRequest]:
    """Return requests with all features that recovery must preserve; ``plain``: each generates ``max_tokens`` tokens."""
    rng = random.Random(seed)
    prefixes = [" ".join(rng.choices(WORDS, k=60)) for _ in range(3)]
    requests = []
    for number in range(size):
        body: dict[str, Any] = {
            "max_tokens": rng.randint(*max_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "seed": number,
            "temperature": rng.choice([0, 0.7, 1.0]),
            "stop": rng.choice([[], [], ["zq"], [" the end"], ["a", "xyz"]]),
            "ignore_eos": rng.random() < 0.8,
        }
        if body["temperature"] and rng.random() < 0.25:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.3:
            body |= {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1}
        if rng.random() < 0.2:
            body |= {"top_p": 0.9, "top_k": 40}
        has_logprobs = rng.random() < 0.2 and not plain
        if plain:
            body |= {"stop": [], "ignore_eos": True}
        prompt = rng.choice([*prefixes, ""]) + " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        if rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": prompt}]
            if has_logprobs:
                body |= {"logprobs": True, "top_logprobs": 2}
            requests.append(StreamRequest("/v1/chat/completions", body))
        else:
            body["prompt"] = prompt
            if has_logprobs:
                body["logprobs"] = 2
            requests.append(StreamRequest("/v1/completions", body))
    return requests


def as_messages(requests: Sequence[StreamRequest]) -> list[StreamRequest]:
    """Convert requests to Anthropic's API; drop unsupported fields."""
    same = ("max_tokens", "stream", "seed", "temperature", "top_p", "top_k")
    found = []
    for each in requests:
        body = {name: each.body[name] for name in same if name in each.body}
        body["stop_sequences"] = each.body["stop"]
        turns = each.body.get("messages") or [{"role": "user", "content": each.body["prompt"]}]
        found.append(StreamRequest("/v1/messages", {**body, "messages": turns}))
    return found


def as_responses(requests: Sequence[StreamRequest], **fields: Any) -> list[StreamRequest]:
    """Convert requests to the Responses API; drop unsupported fields. ``fields``: added to each."""
    same = ("stream", "seed", "temperature", "top_p", "top_k", "stop", "ignore_eos", "repetition_penalty")
    found = []
    for each in requests:
        body = {name: each.body[name] for name in same if name in each.body} | fields
        body["max_output_tokens"] = each.body["max_tokens"]
        given = each.body.get("messages") or each.body["prompt"]
        found.append(StreamRequest("/v1/responses", {**body, "input": given}))
    return found


class Disconnect(Exception):
    """Raised by ``on_event`` to close the connection after an event."""


async def stream_request(
    url: str,
    request: StreamRequest,
    result: StreamResult,
    on_event: Callable[[], None] = lambda: None,
    other_urls: Sequence[str] = (),
    resend: bool = False,
) -> None:
    """Send a request and read its stream to the end; reconnect and resume after the last event when the connection is lost.

    other_urls: further servers; each reconnection uses the next one. resend: resume by the request itself with
    ``Last-Event-ID``, not by ``GET /v1/streams``.
    """
    addresses = itertools.cycle(map(urlsplit, (url, *other_urls)))
    result.sent_s = time.perf_counter()
    deadline_s = result.sent_s + TIMEOUT_S
    while not result.is_done and not result.error and time.perf_counter() < deadline_s:
        where = next(addresses)
        result.num_sent += not result.event_ids
        result.num_connections += 1
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
        except OSError:
            await asyncio.sleep(PAUSE_S)
            continue
        writer.write(_request(request, result.event_ids[-1:], where.netloc, resend))
        try:
            await read_events(reader, result, on_event)
        except (Disconnect, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(PAUSE_S)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _request(request: StreamRequest, last: list[str], host: str, resend: bool) -> bytes:
    """Return the bytes of a request, or of its resumption; last: the id of the last event, if there is one."""
    head = f"Host: {host}\r\nConnection: close\r\n"
    if last and not resend:
        stream, _, position = last[0].partition(":")
        return f"GET /v1/streams/{stream}?from={position} HTTP/1.1\r\n{head}\r\n".encode()
    head += f"Last-Event-ID: {last[0]}\r\n" if last else ""
    body = json.dumps(request.body).encode()
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST {request.path} HTTP/1.1\r\n{head}".encode() + body


async def read_events(
    reader: asyncio.StreamReader, result: StreamResult, on_event: Callable[[], None]
) -> None:
    """Read a response to its end; drop an incomplete last event."""
    event_id = ""
    while line := await asyncio.wait_for(reader.readline(), TIMEOUT_S):
        if line.startswith(b"HTTP/1.1 "):
            result.status = int(line.split()[1])
        elif line.startswith(b"id: "):
            event_id = line[4:].strip().decode()
        elif line.startswith(b"data: [DONE]"):
            result.is_done = True
        elif line.startswith(b"data: "):
            if not line.endswith(b"\n"):
                raise asyncio.IncompleteReadError(line, None)
            if event_id:
                result.event_ids.append(event_id)
                event_id = ""
            result.times_s.append(time.perf_counter())
            result.feed(json.loads(line[6:]))
            on_event()
        elif line.startswith(b'{"error"'):
            result.error = line.decode()


@dataclass(slots=True)
class Run:
    """Results of a run of several requests."""

    results: list[StreamResult]
    duration_s: float

    def bytes_of(self) -> list[str]:
        """Return `StreamResult.bytes_of` of each."""
        return [result.bytes_of() for result in self.results]

    @property
    def longest_wait_s(self) -> float:
        """Longest wait of any client for an event."""
        return max(result.longest_wait_s for result in self.results)


async def run_requests(
    url: str,
    requests: list[StreamRequest],
    disturb: Callable[[], Any] | None = None,
    other_urls: Sequence[str] = (),
    is_due: Callable[[set[int]], bool] | None = None,
) -> Run:
    """Send all requests at once; call ``disturb`` (a coroutine function) when half of them have received an event.

    other_urls: further servers; clients start at one server each, in turn, and resume at the next one. is_due: replaces the
    condition of half of the requests; its argument is the indices of the requests that have received an event.
    """
    results = [StreamResult() for _ in requests]
    is_disturbance_due = asyncio.Event()
    started: set[int] = set()

    def record_event(number: int) -> None:
        started.add(number)
        if 2 * len(started) >= len(requests) if is_due is None else is_due(started):
            is_disturbance_due.set()

    async def run_client(number: int) -> None:
        turn = number % (1 + len(other_urls))
        first, *others = [url, *other_urls][turn:] + [url, *other_urls][:turn]
        await stream_request(first, requests[number], results[number], lambda: record_event(number), others)

    at_s = time.perf_counter()
    clients = [asyncio.create_task(run_client(number)) for number in range(len(requests))]
    if disturb is not None:
        await is_disturbance_due.wait()
        await disturb()
    outcomes = await asyncio.gather(*clients, return_exceptions=True)
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            results[number].error += f"{type(outcome).__name__}: {outcome}"
    return Run(results, time.perf_counter() - at_s)


def differences(reference: Run, disturbed: Run, requests: list[StreamRequest]) -> list[str]:
    """Return a line for each request with different bytes in the two runs."""
    return [
        f"{number} {requests[number].path} {shorten(requests[number].body)}: {first[:300]} became {second[:300]}"
        for number, (first, second) in enumerate(zip(reference.bytes_of(), disturbed.bytes_of(), strict=True))
        if first != second
    ]


def shorten(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without its prompt."""
    return {
        name: value
        for name, value in body.items()
        if name not in ("prompt", "messages", "input", "stream_options")
    }
