"""What a conversation of another API adds to a `ChatBody`: places for error messages, and deferred tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.api.openai.offered_tools import OfferedTool


@dataclass(frozen=True, slots=True)
class Translation:
    """What a conversation of another API would lose as a `ChatBody`."""

    message_names: Sequence[str] = ()
    """Of each message: where it stands in the client's body."""
    deferred: Sequence[OfferedTool] = ()
    """Tools that the model may call, and that the template does not show: a search has found them, or will."""


AS_SENT = Translation()
