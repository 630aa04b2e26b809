"""How a controller knows this worker: registered while its server takes requests, withdrawn while it does not.

A controller forgets who sends no heartbeats only after a minute and a half, and sends requests there until then. So a worker
whose server is gone registers as one without models, and nobody is sent to it; when the server is back, with its models again.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from quintet.deploy.integrations.fastchat.errors import error_in
from quintet.deploy.integrations.fastchat.peer import Peer

LOOK_S = 1.0
"""Between two looks at the server."""
PATIENCE_S = 5.0
"""For an answer of the server or the controller; and between two tries to reach the controller."""
MAX_SILENT = 3
"""Looks in a row that a server may leave unanswered."""
_log = logging.getLogger("quintet")


class Model(msgspec.Struct, frozen=True):
    """What the server serves."""

    names: tuple[str, ...]
    max_len: int
    """Tokens of prompt and output together."""


class _Listed(msgspec.Struct):
    id: str
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Listed]


class _Ready(msgspec.Struct):
    draining: bool = False


class _Beat(msgspec.Struct):
    exist: bool


class Registration:
    """One worker's."""

    def __init__(self, controller: Peer, server: Peer, address: str, beat_s: float) -> None:
        """``address``: where controller and clients reach this worker."""
        self._controller, self._server = controller, server
        self._address, self._beat_s = address, beat_s
        self.num_open = 0
        """Requests that this worker has."""
        self.model: Model | None = None
        """None while the server takes no requests."""
        self.max_len = 0
        """Of the model that was served last."""
        self._num_silent = 0
        self._is_told = True
        """Whether the controller knows what there is to know."""
        self._due_s = 0.0
        self._troubles: dict[Peer, str] = {}
        """What was last said of each."""

    def status(self) -> dict[str, object]:
        """Return what a controller asks for."""
        names = () if self.model is None else self.model.names
        return {"model_names": names, "speed": 1, "queue_length": self.num_open}

    async def run(self) -> None:
        """Keep the controller informed for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look at the server, and tell the controller what is new, or due."""
        found = await self._find()
        if found != self.model:
            self.model, self._is_told = found, False
            self.max_len = found.max_len if found is not None else self.max_len
            names = "" if found is None else f" serves {', '.join(found.names)}"
            _log.info("%s%s", self._server, names or " takes no requests")
            self._due_s = 0.0
        if (not self._is_told or found is not None) and time.monotonic() >= self._due_s:
            await self._tell()

    async def withdraw(self) -> None:
        """Have the controller send nobody here any more."""
        if self.model is not None:
            self.model, self._is_told = None, False
            await self._tell()

    async def _tell(self) -> None:
        """Register, or send a heartbeat."""
        try:
            if self._is_told:
                beat = {"worker_name": self._address, "queue_length": self.num_open}
                answer = await self._post("/receive_heart_beat", beat)
                self._is_told = msgspec.json.decode(answer, type=_Beat).exist
            if not self._is_told:
                about = {
                    "worker_name": self._address,
                    "check_heart_beat": True,
                    "worker_status": self.status(),
                }
                await self._post("/register_worker", about)
                self._is_told = True
                _log.info("%s", "registered" if self.model is not None else "withdrawn")
            self._troubles.pop(self._controller, None)
            self._due_s = time.monotonic() + self._beat_s
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            words = f"cannot be told of this worker: {error or 'it does not answer'}; it is tried again"
            self._complain(self._controller, words)
            self._due_s = time.monotonic() + PATIENCE_S

    def _complain(self, peer: Peer, words: str) -> None:
        """Say what is new."""
        if words != self._troubles.get(peer):
            _log.warning("%s %s", peer, words)
        self._troubles[peer] = words

    async def _post(self, path: str, body: object) -> bytes:
        answer = await self._controller.ask("POST", path, body, PATIENCE_S)
        if answer.status != 200:
            raise ConnectionError(f"{path} is answered with status {answer.status}")
        return answer.body

    async def _find(self) -> Model | None:
        """Return what the server serves, if it takes requests: one of which processes are being replaced does."""
        try:
            ready = await self._server.ask("GET", "/readyz", None, PATIENCE_S)
            if ready.status not in (200, 503):
                self._complain(
                    self._server,
                    f"answers /readyz with {ready.status}: name a server of Quintet's with --server",
                )
                return None
            if ready.status != 200:
                is_leaving = msgspec.json.decode(ready.body, type=_Ready).draining
                return None if is_leaving else self.model
            listed = await self._server.ask("GET", "/v1/models", None, PATIENCE_S)
            self._num_silent = 0
            if listed.status != 200:
                words = error_in(listed.body, listed.status).message
                self._complain(self._server, f"refuses: {words} The worker's --api-key is sent there.")
                return None
            models = msgspec.json.decode(listed.body, type=_Models).data
        except TimeoutError:
            self._num_silent += 1
            return None if self._num_silent >= MAX_SILENT else self.model
        except (OSError, msgspec.MsgspecError):
            return None
        return Model(tuple(model.id for model in models), models[0].max_model_len) if models else None
