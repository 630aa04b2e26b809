"""Additions to a `ChatBody` translated from another API: error locations and deferred tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.api.openai.offered_tools import OfferedTool


@dataclass(frozen=True, slots=True)
class Translation:
    """Information of another API's conversation that a `ChatBody` cannot hold."""

    message_names: Sequence[str] = ()
    """Location of each message in the client's body."""
    deferred: Sequence[OfferedTool] = ()
    """Tools that the model may call but the template does not show: found by a tool search."""


AS_SENT = Translation()
