"""Request state of the core, in parts of equal lifetime.

`Request`: identity and specification, which are `Final`, and progress. `RequestKv`: blocks and checkpoints. `Delivery`: the
newest attempt, its detokenizer, and what they were sent. `RequestStats`: figures for metrics.

Lengths of a request, and their writers:

    0            computed        planned     len(tokens)    length        limit
    |---- KV known ---|-- in flight --|-- pending --|~ drawn in ~|   ...   |
                      ^ commit        ^ schedule    ^ commit     ^ schedule
                                                       flight

``length`` counts the tokens that steps in flight will draw, so plans do not wait for their values. A request has
uncomputed tokens while ``planned < length``, whether prompt or output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from quintet.core.kv.groups import GroupBlocks
from quintet.core.kv.prefix import extend_chain
from quintet.core.requests.repetition import Repetition
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.messages import Admit
from quintet.wire.request import RequestSpec


class Status(IntEnum):
    """Life-cycle state of a request: queued, running or ended."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class RequestKv(msgspec.Struct):
    """KV blocks, states and hash chain of a request. Blocks are held only while it runs."""

    held: list[GroupBlocks] = []
    """Blocks, one entry per group of layers; empty unless running."""
    digests: list[bytes] = []
    """Hash chain of its full blocks, as far as it was needed."""
    state_start: int = 0
    """Number of tokens covered by the state it started from; 0 if it started from none."""
    checkpoint_at: int | None = None
    """Number of tokens after which the next state checkpoint is due (`quintet.core.recurrent_state`)."""
    pending_states: list[tuple[int, list[int]]] = []
    """State checkpoints that still lack known tokens: token count and one block per state group."""
    fork_state_blocks: list[int] = []
    """Initial state of the further choices, one block per state group; set on the first choice."""


@dataclass(slots=True)
class Delivery:
    """The newest attempt, and what its receivers were sent."""

    attempt: int = 0
    num_seen: int = 0
    """Outputs that the frontend had received when it sent the newest attempt."""
    origin: Admit | None = None
    """The `Admit` message, if the request is resumable (`RequestSpec.resume_token`)."""
    opened: bool = False
    """True once its detokenizer knows the request."""
    prompt_logprobs_end: int = 1
    """Prompt position up to which log-probabilities were forwarded (the first position has none)."""


@dataclass(slots=True)
class RequestStats:
    """Figures of a request for metrics and usage."""

    scheduled_ns: int | None = None
    """Time at which its first step was planned."""
    first_token_ns: int | None = None
    """Time at which its first drawn token was committed."""
    num_cached: int = 0
    """Prompt tokens that were cached when it was first scheduled."""
    num_computed: int = 0
    """Prompt tokens to compute when it was first scheduled, less those that others computed before its next chunks."""
    num_preemptions: int = 0
    num_open: int = 1
    """Choices that have not ended; set on the first choice."""
    longest: int = 0
    """Most outputs of an ended choice; set on the first choice."""


@dataclass(slots=True, eq=False)
class Request:
    """A live request (one choice). Compared by identity."""

    request_id: Final[int]
    first_id: Final[int]
    """Id of the first choice of the original request."""
    spec: Final[RequestSpec]
    """The client's request; its ``params.n`` choices share it."""
    seed: Final[int]
    num_prompt: Final[int]
    stops: Final[dict[int, bool]]
    """Stop token -> True if the request named it, so that the client gets it as the stop reason."""
    rank: Final[tuple[int, int]]
    """Scheduling order among all requests, smaller first; unique."""
    salt_digest: Final[bytes]
    """Start of its hash chain in the prefix cache."""
    detokenizer: int
    """Index of the detokenizer of the newest attempt."""
    delivery: Final[Delivery]
    tokens: list[int]
    """Prompt and known outputs. Shared among choices until each is first scheduled."""
    limit: int
    """Maximum number of tokens, prompt included."""
    plan_until: int
    """Length from which on no step is planned: ``limit`` less `num_unverified_drafts`."""
    length: int
    bad_word_ids: Final[list[list[int]]] = field(default_factory=list)
    embeds: Final[list[EmbedsSpan]] = field(default_factory=list)
    """Prompt tokens given as embeddings; their entries in ``tokens`` are placeholders."""
    parent: Final[Request | None] = None
    """First choice, which shares its prompt; None for the first choice itself."""
    repetition: Final[Repetition | None] = None
    """Repetition detector; None when disabled."""

    status: Status = Status.WAITING
    planned: int = 0
    computed: int = 0
    num_covered: int = 0
    """Tokens that can be planned before the blocks must be extended, or before a state must be checkpointed."""
    register_at: int = 0
    """Number of planned known tokens at which the next full block is registered in the prefix cache."""
    num_unverified_drafts: int = 0
    """Drafts in flight; ``num_covered`` and ``plan_until`` are reduced by it."""
    has_drawn: bool = False
    """True once a drawn token was committed (`RequestStats.first_token_ns`)."""
    slot: int = 0
    """Row in the executor's tables; valid only while running."""
    generation: int = 0
    """Changes whenever the request enters or leaves a slot; plan rows with another generation are void."""
    is_preempt_deferred: bool = False
    """Preemption is deferred until the step in flight has drawn its token (`SchedulerState.defer_preempt`)."""
    is_draining: bool = False
    """The client is gone (`SchedulerState.drain`): only tokens in flight are awaited."""
    kv: Final[RequestKv] = field(default_factory=RequestKv)
    stats: Final[RequestStats] = field(default_factory=RequestStats)

    @property
    def num_outputs(self) -> int:
        """Number of known output tokens."""
        return len(self.tokens) - self.num_prompt

    def hash_blocks(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Return its block digests, extended to at least the first ``num_blocks`` full blocks."""
        extend_chain(self.kv.digests, self.salt_digest, self.tokens, block_size, num_blocks, self.embeds)
        return self.kv.digests
