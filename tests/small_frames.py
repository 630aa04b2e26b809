"""Lower frame size limits for receivers, since real oversized frames would take gigabytes."""

from __future__ import annotations

import pytest

from quintet.process.sockets import Peers
from quintet.wire.ids import Role
from quintet.wire.limits import FrameTooLarge


def limit_frames(monkeypatch: pytest.MonkeyPatch, role: Role, max_bytes: int) -> None:
    """Limit frames to this role to ``max_bytes`` until the test ends."""
    send = Peers.send_payload

    def send_payload(peers: Peers, to: Role, index: int, payload: bytes) -> bool:
        if to is role and len(payload) > max_bytes:
            raise FrameTooLarge(len(payload), to, max_bytes)
        return send(peers, to, index, payload)

    monkeypatch.setattr(Peers, "send_payload", send_payload)
