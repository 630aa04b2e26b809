"""A crowd of streamed requests, each in its own way, and what its client has at the end.

Two runs of the same crowd must leave the same bytes, whatever was killed in between: `Heard` holds all that must not
differ. The crowd is seeded: greedy and seeded draws, several choices, stop strings, penalties, log-probabilities,
common beginnings, chats and completions.
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
"""Before a client tries again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class ChoiceHeard:
    """One choice, put together from its events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_endings: int = 0


@dataclass(slots=True)
class Heard:
    """One answer. Compare `bytes_of` of two."""

    status: int = 0
    choices: dict[int, ChoiceHeard] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False
    """True once ``[DONE]``, or the last event of another dialect, was received."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Of the Responses dialect: all of them, but for what differs from run to run, and where deltas were cut."""
    numbers: list[int] = field(default_factory=list)
    """Theirs, as they came."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in the server's events, by their replacement."""
    asked_s: float = 0.0
    """`time.perf_counter` when it was first asked for."""
    times_s: list[float] = field(default_factory=list)
    """That of every event."""
    event_ids: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_asked: int = 0
    """Of those, how many sent the request from its beginning."""

    @property
    def longest_wait_s(self) -> float:
        """Longest wait for an event: from the one before, for the first from when it was asked for."""
        return max((b - a for a, b in itertools.pairwise([self.asked_s, *self.times_s])), default=0.0)

    def bytes_of(self) -> str:
        """Return everything that must be the same in every run: not when it came, nor in which pieces."""
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
            choice = self.choices.setdefault(part["index"], ChoiceHeard())
            delta = part.get("delta")
            choice.text += (delta.get("content") or "") if delta is not None else part["text"]
            choice.token_ids += part.get("token_ids") or []
            if part.get("logprobs"):
                choice.logprobs += _entries(part["logprobs"])
            if part.get("finish_reason"):
                choice.finish_reason, choice.stop_reason = part["finish_reason"], part.get("stop_reason")
                choice.num_endings += 1

    def _feed_messages(self, event: dict[str, Any]) -> None:
        """Apply an event of Anthropic's dialect."""
        choice = self.choices.setdefault(0, ChoiceHeard())
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
        """Apply an event of the Responses dialect."""
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


def crowd(
    seed: int, size: int, max_tokens: tuple[int, int] = (60, 160), *, plain: bool = False
) -> list[Asked]:
    """Return requests that use everything a recovery could get wrong; ``plain``: each ends by its length alone."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(WORDS, k=60)) for _ in range(3)]
    asked = []
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
        wants_logprobs = rng.random() < 0.2 and not plain
        if plain:
            body |= {"stop": [], "ignore_eos": True}
        prompt = rng.choice([*beginnings, ""]) + " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        if rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": prompt}]
            if wants_logprobs:
                body |= {"logprobs": True, "top_logprobs": 2}
            asked.append(Asked("/v1/chat/completions", body))
        else:
            body["prompt"] = prompt
            if wants_logprobs:
                body["logprobs"] = 2
            asked.append(Asked("/v1/completions", body))
    return asked


def as_messages(asked: Sequence[Asked]) -> list[Asked]:
    """Return what of these requests Anthropic's dialect can ask for."""
    same = ("max_tokens", "stream", "seed", "temperature", "top_p", "top_k")
    found = []
    for each in asked:
        body = {name: each.body[name] for name in same if name in each.body}
        body["stop_sequences"] = each.body["stop"]
        turns = each.body.get("messages") or [{"role": "user", "content": each.body["prompt"]}]
        found.append(Asked("/v1/messages", {**body, "messages": turns}))
    return found


def as_responses(asked: Sequence[Asked], **fields: Any) -> list[Asked]:
    """Return what of these requests the Responses dialect can ask for; ``fields``: of each besides."""
    same = ("stream", "seed", "temperature", "top_p", "top_k", "stop", "ignore_eos", "repetition_penalty")
    found = []
    for each in asked:
        body = {name: each.body[name] for name in same if name in each.body} | fields
        body["max_output_tokens"] = each.body["max_tokens"]
        given = each.body.get("messages") or each.body["prompt"]
        found.append(Asked("/v1/responses", {**body, "input": given}))
    return found


class Cut(Exception):
    """Raised by an ``on_event`` to cut the connection there."""


async def listen(
    url: str,
    asked: Asked,
    heard: Heard,
    on_event: Callable[[], None] = lambda: None,
    elsewhere: Sequence[str] = (),
    repeats: bool = False,
) -> None:
    """Send one request and hear its answer out, over as many connections as it takes.

    After a connection is lost in the middle, the next one asks for what comes after the last event: ``elsewhere``, where
    other addresses are given, one after the other. ``repeats``: by the request once more, with the id of that event.
    """
    doors = itertools.cycle(map(urlsplit, (url, *elsewhere)))
    heard.asked_s = time.perf_counter()
    deadline_s = heard.asked_s + TIMEOUT_S
    while not heard.is_done and not heard.error and time.perf_counter() < deadline_s:
        where = next(doors)
        heard.num_asked += not heard.event_ids
        heard.num_connections += 1
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
        except OSError:
            await asyncio.sleep(PAUSE_S)
            continue
        writer.write(_request(asked, heard.event_ids[-1:], where.netloc, repeats))
        try:
            await read_events(reader, heard, on_event)
        except (Cut, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(PAUSE_S)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _request(asked: Asked, last: list[str], host: str, repeats: bool) -> bytes:
    """Return what is sent; last: the id of the last event, if any has come."""
    head = f"Host: {host}\r\nConnection: close\r\n"
    if last and not repeats:
        stream, _, position = last[0].partition(":")
        return f"GET /v1/streams/{stream}?from={position} HTTP/1.1\r\n{head}\r\n".encode()
    head += f"Last-Event-ID: {last[0]}\r\n" if last else ""
    body = json.dumps(asked.body).encode()
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST {asked.path} HTTP/1.1\r\n{head}".encode() + body


async def read_events(reader: asyncio.StreamReader, heard: Heard, on_event: Callable[[], None]) -> None:
    """Read a response to its end. Of an event that has not come whole nothing is kept."""
    event_id = ""
    while line := await asyncio.wait_for(reader.readline(), TIMEOUT_S):
        if line.startswith(b"HTTP/1.1 "):
            heard.status = int(line.split()[1])
        elif line.startswith(b"id: "):
            event_id = line[4:].strip().decode()
        elif line.startswith(b"data: [DONE]"):
            heard.is_done = True
        elif line.startswith(b"data: "):
            if not line.endswith(b"\n"):
                raise asyncio.IncompleteReadError(line, None)
            if event_id:
                heard.event_ids.append(event_id)
                event_id = ""
            heard.times_s.append(time.perf_counter())
            heard.feed(json.loads(line[6:]))
            on_event()
        elif line.startswith(b'{"error"'):
            heard.error = line.decode()


@dataclass(slots=True)
class Run:
    """A whole crowd's answers."""

    heard: list[Heard]
    duration_s: float

    def bytes_of(self) -> list[str]:
        """Return `Heard.bytes_of` of each."""
        return [heard.bytes_of() for heard in self.heard]

    @property
    def longest_wait_s(self) -> float:
        """Longest wait of any client for an event."""
        return max(heard.longest_wait_s for heard in self.heard)


async def play(
    url: str,
    asked: list[Asked],
    disturb: Callable[[], Any] | None = None,
    elsewhere: Sequence[str] = (),
    is_time: Callable[[set[int]], bool] | None = None,
) -> Run:
    """Send a crowd at once; call ``disturb`` (a coroutine function) when half of it has had its first event.

    ``elsewhere``: other addresses, at which clients start in turn, and resume when they lose a connection. ``is_time``: whether
    to disturb, given the numbers of those that have had their first event, in the place of half.
    """
    heard = [Heard() for _ in asked]
    begun = asyncio.Event()
    started: set[int] = set()

    def note(number: int) -> None:
        started.add(number)
        if 2 * len(started) >= len(asked) if is_time is None else is_time(started):
            begun.set()

    async def hear(number: int) -> None:
        turn = number % (1 + len(elsewhere))
        first, *others = [url, *elsewhere][turn:] + [url, *elsewhere][:turn]
        await listen(first, asked[number], heard[number], lambda: note(number), others)

    at_s = time.perf_counter()
    clients = [asyncio.create_task(hear(number)) for number in range(len(asked))]
    if disturb is not None:
        await begun.wait()
        await disturb()
    results = await asyncio.gather(*clients, return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, BaseException):
            heard[number].error += f"{type(result).__name__}: {result}"
    return Run(heard, time.perf_counter() - at_s)


def differences(calm: Run, disturbed: Run, asked: list[Asked]) -> list[str]:
    """Return a line for each request with different bytes in the two runs."""
    return [
        f"{number} {asked[number].path} {shorten(asked[number].body)}: {first[:300]} became {second[:300]}"
        for number, (first, second) in enumerate(zip(calm.bytes_of(), disturbed.bytes_of(), strict=True))
        if first != second
    ]


def shorten(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without its prompt."""
    return {
        name: value
        for name, value in body.items()
        if name not in ("prompt", "messages", "input", "stream_options")
    }
