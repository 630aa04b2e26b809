"""Receivers that take less than they do: what is too large for a real one would take gigabytes to make."""

from __future__ import annotations

import pytest

from quintet.process.sockets import Peers
from quintet.wire.ids import Role
from quintet.wire.limits import FrameTooLarge


def take_at_most(monkeypatch: pytest.MonkeyPatch, role: Role, most: int) -> None:
    """Have processes of this role take at most so many bytes at a time, until the test ends."""
    send = Peers.send_payload

    def send_payload(peers: Peers, to: Role, index: int, payload: bytes) -> bool:
        if to is role and len(payload) > most:
            raise FrameTooLarge(len(payload), to, most)
        return send(peers, to, index, payload)

    monkeypatch.setattr(Peers, "send_payload", send_payload)
