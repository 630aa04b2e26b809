"""What a request is on its whole way in: one struct, which the frontend fills and everybody passes on as it is."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.params import SamplingParams

MAX_NAME_CHARS = 64
"""Of a parser's name."""

MAX_SCHEMAS_BYTES = 1 << 18
"""Of `OutputParsing.schemas`: detokenizers are told them of every request that begins in a step."""


class ResumeToken(msgspec.Struct, array_like=True):
    """What any frontend needs to go on with a request whose frontend or client is gone."""

    key: bytes
    """Secret of the client's: who knows it may go on reading."""
    answer: bytes
    """How the answer is shaped: only the frontends' dialects look inside."""


class OutputParsing(msgspec.Struct, array_like=True):
    """How the detokenizer reads the output: which parsers, and what they need."""

    reasoning: str = ""
    """Name of a reasoning parser; "" for none."""
    tools: str = ""
    """Name of a tool parser; "" for none."""
    schemas: bytes = b""
    """JSON of the request's tools, for parsers whose arguments have no types of their own."""
    insists: bool = False
    """Whether the form that the answer must have (`SamplingParams`) is that of calls."""


class Echo(IntEnum):
    """Whether the text begins with the prompt's, and with which of its special tokens."""

    NONE = 0
    PLAIN = 1
    """As the output: with none where it skips them, for the tokenizer may have added them."""
    WHOLE = 2
    """With all of them: they are the client's own."""


MAX_PEER_CHARS = 300
"""Of `KvTransfer.peer`."""


class KvTransfer(msgspec.Struct, array_like=True):
    """What a request has to do with KV of other servers (``docs/apart.md``)."""

    offers: bool = False
    """Whether its prompt's blocks are offered to other servers when it has ended."""
    peer: str = ""
    """``host:port`` where its prompt's blocks are fetched from; "" for nowhere."""
    num_blocks: int = 0
    """So many of the prompt's blocks, from the first on, are offered there."""


class RequestSpec(msgspec.Struct, array_like=True):
    """Inside `Submit` and `Admit`: all of a request but its prompt and its way, from the frontend to the core unchanged.

    Fields of the attempt (``choice`` … ``attempt``, ``topology``) change from one to the next: see `Submit`.
    """

    params: SamplingParams
    """Checked, and with a seed."""
    arrival_ns: int
    detokenizer: int
    """Index of the detokenizer that keeps the request for its life."""
    priority: int = 0
    """Lower runs first, under the priority policy."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only between requests of the same salt."""
    echo: Echo = Echo.NONE
    return_prompt_ids: bool = False
    choice: int = 0
    """Which choice of the original request the first one of this is."""
    output_ids: bytes = b""
    """int32: outputs that the frontend has. Nothing of them is sent again."""
    attempt: int = 0
    deadline_ns: int = 0
    """When the client wants it to have ended; 0 for never."""
    claim: ResumeToken | None = None
    """What makes it resumable after its frontend is gone, or after its client left."""
    adopts: bool = False
    """Go on with what the core keeps under this id (`Reclaim.rename_to`)."""
    topology: int = 0
    """Version of the topology that the frontend chose by: who follows an older one waits for it, or would send on to the dead."""
    reading: OutputParsing | None = None
    """How the output is read; None where it is all plain text."""
    tells: bool = False
    """Nobody has ``output_ids`` as text yet: they are told as if they had just been drawn."""
    handover: KvTransfer | None = None
    """None where its KV is this server's own affair."""

    @property
    def num_seen(self) -> int:
        """Outputs that need not be told."""
        return 0 if self.tells else len(self.output_ids) // 4


def room_for_output(max_tokens: int | None, limit_gives_way: bool, max_model_len: int) -> int:
    """Return how many tokens of the context are left to the output where as much of a prompt is kept as fits."""
    room = max_tokens or 1
    if limit_gives_way and 2 * room > max_model_len:
        return 1  # a default must not take more of the context than it leaves to the prompt
    return room
