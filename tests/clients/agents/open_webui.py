"""Open WebUI's back end, driven through its own HTTP API and Socket.IO as its web page drives it.

Runs in the environment of the package ``open-webui``. Arguments: URL of the Quintet server, name of the model. Prints a JSON list
with ``[prompt_tokens, cached_tokens]`` of each request of a chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import socketio

TOOL = '''
class Tools:
    def weather(self, city: str) -> str:
        """
        Look up the weather of a city.

        :param city: name of the city
        """
        return f"Fine in {city}"
'''
QUESTION, ANSWER, TITLE = "Weather in Oslo?", "It is fine in Oslo.", "Weather of Oslo"
MAX_S = 110
"""Below the time limit of the test, so that the back end is stopped in any case."""

Event = dict[str, Any]


def settings(server: str) -> dict[str, str]:
    """Return the back end's environment: one OpenAI-compatible server, one user without a password, no downloads."""
    return os.environ | {
        "OPENAI_API_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": "unused",
        "ENABLE_OLLAMA_API": "False",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "a key of at least thirty-two bytes",
        "DATA_DIR": str(Path.cwd() / "open_webui"),
        "USE_SLIM_DOCKER": "true",  # for its requirements-slim.txt: no embeddings or speech models
        "OFFLINE_MODE": "true",
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.asynccontextmanager
async def back_end(server: str) -> AsyncIterator[str]:
    """Start the back end; yield its URL once it is healthy."""
    port = free_port()
    url, program = f"http://127.0.0.1:{port}", Path(sys.executable).with_name("open-webui")
    command = (program, "serve", "--host", "127.0.0.1", "--port", str(port))
    process = await asyncio.create_subprocess_exec(*command, env=settings(server), stdout=sys.stderr)
    try:
        async with aiohttp.ClientSession() as client:
            while not await is_healthy(client, url):
                assert process.returncode is None, f"the back end ended with status {process.returncode}"
                await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()


async def is_healthy(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def ask(client: aiohttp.ClientSession, method: str, path: str, body: object = None) -> Any:
    """Send one request to the back end; return the decoded answer."""
    async with client.request(method, path, json=body) as answer:
        assert answer.status == 200, (path, answer.status, await answer.text())
        return await answer.json()


async def check_own_api(client: aiohttp.ClientSession, model: str) -> None:
    """List models, and chat over HTTP: a whole response and a stream."""
    models = await ask(client, "GET", "/api/models")
    assert model in [each["id"] for each in models["data"]], models
    body = {"model": model, "messages": [{"role": "user", "content": "Fine in Oslo"}]}
    whole = await ask(client, "POST", "/api/chat/completions", body)
    assert whole["choices"][0]["message"]["content"] == ANSWER, whole
    async with client.post("/api/chat/completions", json=body | {"stream": True}) as answer:
        lines = (await answer.text()).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]", lines
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(texts) == ANSWER, texts  # a slow reader gets several tokens in one event


class Page:
    """One chat of the web page: requests over HTTP, responses as events over Socket.IO, history in the back end."""

    def __init__(self, client: aiohttp.ClientSession, model: str) -> None:
        self._client = client
        self._model = model
        self._socket = socketio.AsyncClient()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._chat_id: str | None = None
        self._last_message_id: str | None = None
        self.title = ""

    @contextlib.asynccontextmanager
    async def connected(self, url: str, token: str) -> AsyncIterator[None]:
        self._socket.on("events", self._events.put)
        path, transports = "/ws/socket.io", ["websocket"]
        await self._socket.connect(url, auth={"token": token}, socketio_path=path, transports=transports)
        try:
            yield
        finally:
            await self._socket.disconnect()

    async def say(self, text: str) -> list[Event]:
        """Send a message; return the events of its answer."""
        answer_id = str(uuid.uuid4())
        message = {
            "id": str(uuid.uuid4()),
            "parentId": self._last_message_id,
            "role": "user",
            "content": text,
        }
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "user_message": message,
            "id": answer_id,
            "parent_id": self._last_message_id,
            "session_id": self._socket.sid,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tool_ids": ["weather"],
            "background_tasks": {"title_generation": self._chat_id is None},
        }
        known = {} if self._chat_id is None else {"chat_id": self._chat_id}
        started = await ask(self._client, "POST", "/api/chat/completions", body | known)
        self._chat_id, self._last_message_id = started["chat_id"], answer_id
        return await self._answer()

    async def _answer(self) -> list[Event]:
        """Return the events of an answer when it has ended, and the chat has a title."""
        events: list[Event] = []
        has_ended = False
        while not (has_ended and self.title):
            event = (await self._events.get())["data"]
            events.append(event)
            if event["type"] == "chat:title":
                self.title = event["data"]
            has_ended = has_ended or (event["type"] == "chat:completion" and bool(event["data"].get("done")))
        return events

    async def stored(self) -> Event:
        """Return the newest answer as the back end stores it."""
        chat = await ask(self._client, "GET", f"/api/v1/chats/{self._chat_id}")
        return chat["chat"]["history"]["messages"][self._last_message_id]


def check_answer(events: list[Event], stored: Event) -> None:
    """Check one turn: reasoning, a call that the back end runs, its result, the streamed answer."""
    kinds = ["reasoning", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in stored["output"]] == kinds, stored
    reasoning, call, result, _ = stored["output"]
    assert reasoning["content"][0]["text"].strip() == "I look.", stored
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"}), stored
    assert result["output"][0]["text"] == "Fine in Oslo", stored
    assert stored["content"] == ANSWER and "error" not in stored, stored
    parts = [event["data"] for event in events if event["type"] == "response:completion"]
    texts = [part["delta"] for part in parts if part.get("type") == "response.output_text.delta"]
    assert "".join(texts) == ANSWER, events  # a slow reader gets several tokens in one event


def usages_of(events: list[Event]) -> list[tuple[int, int]]:
    """Return prompt tokens and cached tokens of each request of a turn. The back end reports cumulative cached tokens."""
    data = [event["data"] for event in events if event["type"] == "chat:completion"]
    usages = [each["usage"] for each in data if "usage" in each and not each.get("done")]
    sums = [0, *(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)]
    return [(usage["prompt_tokens"], sums[i + 1] - sums[i]) for i, usage in enumerate(usages)]


async def main(server: str, model: str) -> None:
    async with asyncio.timeout(MAX_S), back_end(server) as url:
        async with aiohttp.ClientSession(url) as client:
            token = (await ask(client, "POST", "/api/v1/auths/signin", {"email": "", "password": ""}))[
                "token"
            ]
        async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {token}"}) as client:
            await check_own_api(client, model)
            tool = {"id": "weather", "name": "Weather", "content": TOOL, "meta": {"description": "weather"}}
            await ask(client, "POST", "/api/v1/tools/create", tool)
            page, usages = Page(client, model), []
            async with page.connected(url, token):
                for text in (QUESTION, f"Again: {QUESTION}"):
                    events = await page.say(text)
                    check_answer(events, await page.stored())
                    usages += usages_of(events)
            assert page.title == TITLE, page.title
            print(json.dumps(usages))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
