"""Registration at the FastChat controller, while the server accepts requests.

The controller forgets a silent worker only after 90 s, and sends requests until then. So while its server is unavailable, the
worker registers without models, which stops requests.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.integrations.fastchat.protocol import error_in

LOOK_S = 1.0
"""Interval of server checks."""
TIMEOUT_S = 5.0
"""Response timeout of server and controller, and retry interval for the controller."""
MAX_SILENT = 3
"""Number of consecutive unanswered checks before the server counts as unavailable."""
_log = logging.getLogger("quintet")


class Model(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    max_len: int
    """Maximum context length in tokens."""


class _Listed(msgspec.Struct):
    id: str
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Listed]


class _Ready(msgspec.Struct):
    draining: bool = False


class _Heartbeat(msgspec.Struct):
    exist: bool


class Registration:
    def __init__(
        self, controller: ConnectionPool, server: ConnectionPool, address: str, heartbeat_s: float
    ) -> None:
        """``address``: address of this worker for controller and clients."""
        self._controller, self._server = controller, server
        self._address, self._heartbeat_s = address, heartbeat_s
        self.num_open = 0
        """Number of open requests."""
        self.model: Model | None = None
        """None while the server accepts no requests."""
        self.max_len = 0
        """Context length of the last served model."""
        self._num_silent = 0
        self._is_up_to_date = True
        """True if the controller has the current state."""
        self._due_s = 0.0
        self._problems: dict[ConnectionPool, str] = {}
        """Last logged problem of each peer."""

    def status(self) -> dict[str, object]:
        names = () if self.model is None else self.model.names
        return {"model_names": names, "speed": 1, "queue_length": self.num_open}

    async def run(self) -> None:
        """Keep the controller informed; never returns."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Check the server, and send changes and heartbeats to the controller."""
        found = await self._find()
        if found != self.model:
            self.model, self._is_up_to_date = found, False
            self.max_len = found.max_len if found is not None else self.max_len
            names = "" if found is None else f" serves {', '.join(found.names)}"
            _log.info("%s%s", self._server.target, names or " accepts no requests")
            self._due_s = 0.0
        if (not self._is_up_to_date or found is not None) and time.monotonic() >= self._due_s:
            await self._notify()

    async def withdraw(self) -> None:
        """Withdraw from the controller, so that it sends no further requests."""
        if self.model is not None:
            self.model, self._is_up_to_date = None, False
            await self._notify()

    async def _notify(self) -> None:
        try:
            if self._is_up_to_date:
                beat = {"worker_name": self._address, "queue_length": self.num_open}
                answer = await self._post("/receive_heart_beat", beat)
                self._is_up_to_date = msgspec.json.decode(answer, type=_Heartbeat).exist
            if not self._is_up_to_date:
                about = {
                    "worker_name": self._address,
                    "check_heart_beat": True,
                    "worker_status": self.status(),
                }
                await self._post("/register_worker", about)
                self._is_up_to_date = True
                _log.info("%s", "registered" if self.model is not None else "withdrawn")
            self._problems.pop(self._controller, None)
            self._due_s = time.monotonic() + self._heartbeat_s
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            words = f"registration failed: {error or 'no response'}; retrying"
            self._log_problem(self._controller, words)
            self._due_s = time.monotonic() + TIMEOUT_S

    def _log_problem(self, peer: ConnectionPool, words: str) -> None:
        """Log a problem unless it was logged before."""
        if words != self._problems.get(peer):
            _log.warning("%s %s", peer.target, words)
        self._problems[peer] = words

    async def _post(self, path: str, body: object) -> bytes:
        answer = await self._controller.ask("POST", path, body, TIMEOUT_S)
        if answer.status != 200:
            raise ConnectionError(f"{path} returned status {answer.status}")
        return answer.body

    async def _find(self) -> Model | None:
        """Return the served model if the server accepts requests. A server that restarts processes still does."""
        try:
            ready = await self._server.ask("GET", "/readyz", None, TIMEOUT_S)
            if ready.status not in (200, 503):
                self._log_problem(
                    self._server,
                    f"returned status {ready.status} for /readyz: set --server to a Quintet server",
                )
                return None
            if ready.status != 200:
                is_draining = msgspec.json.decode(ready.body, type=_Ready).draining
                return None if is_draining else self.model
            listed = await self._server.ask("GET", "/v1/models", None, TIMEOUT_S)
            self._num_silent = 0
            if listed.status != 200:
                words = error_in(listed.body, listed.status).message
                self._log_problem(
                    self._server, f"rejected the request: {words} Check the worker's --api-key."
                )
                return None
            models = msgspec.json.decode(listed.body, type=_Models).data
        except TimeoutError:
            self._num_silent += 1
            return None if self._num_silent >= MAX_SILENT else self.model
        except (OSError, msgspec.MsgspecError):
            return None
        return Model(tuple(model.id for model in models), models[0].max_model_len) if models else None
