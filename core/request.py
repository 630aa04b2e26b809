"""One request as the core sees it: its ids, how far it has come, and what it holds.

Lengths of a request, and who moves them:

    0            computed        planned     len(tokens)    length        limit
    |---- KV known ---|-- in flight --|-- behind --|~ drawn in ~|   ...   |
                      ^ commit        ^ schedule   ^ commit     ^ schedule
                                                     flight

``length`` counts the tokens that steps in flight will draw, so a plan can be made before their values are known. A
request is *behind* while ``planned < length``; whether those tokens are prompt or output makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from quintet.core.kv.group_blocks import GroupBlocks
from quintet.core.repetition import Repetition
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, KvTransfer, OutputParsing


class Status(IntEnum):
    """Where a request is: exactly one of the queue, the running list, or gone."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


@dataclass(slots=True, eq=False)
class Request:
    """A live request (one choice of it). Compared by identity."""

    request_id: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    """The prompt, then every output token that is known. Shared among choices until each is first scheduled."""
    num_prompt: int
    limit: int
    """Most tokens, prompt included, that it may ever have."""
    stops: dict[int, bool]
    """Token that ends the request -> whether the request named it, so that its client is told which it was."""
    rank: tuple[int, int]
    """Order among all requests, smaller first; unique."""
    detokenizer: int
    arrival_ns: int
    salt_digest: bytes
    """Start of its hash chain in the prefix cache."""
    echo: Echo = Echo.NONE
    return_prompt_ids: bool = False
    bad_word_ids: list[list[int]] = field(default_factory=list)
    embeds: EmbedsPrompt | None = None
    """What its prompt is where that is no tokens; those in ``tokens`` then only count."""
    parent: Request | None = None
    """The first choice, whose prompt this one shares; None for the first choice itself."""
    choice: int = 0
    """Its number among the choices of the original request."""
    num_seen: int = 0
    """Outputs that the frontend had when it sent the newest attempt."""
    attempt: int = 0
    origin: Admit | None = None
    """The request as it was admitted, if its client may come back for it (`RequestSpec.claim`)."""
    deadline_ns: int = 0
    """When it must have ended; 0 for never."""
    reading: OutputParsing | None = None
    """Which parsers read its text: only its detokenizer looks inside."""
    handover: KvTransfer | None = None
    """What it has to do with KV of other servers."""
    repetition: Repetition | None = None
    """Set where it is to end when its outputs repeat themselves."""
    is_yielding: bool = False
    """Whether it only waits for the token that a step in flight draws, to be preempted then (`State.give_way`)."""
    is_departing: bool = False
    """Whether its client is gone (`State.wind_down`): it waits for no more than the tokens that steps in flight draw."""

    status: Status = Status.WAITING
    length: int = 0
    planned: int = 0
    computed: int = 0
    slot: int = 0
    """Its row in the executor's tables; meaningless unless running."""
    generation: int = 0
    """Number of its present stay in or out of a slot; rows of plans that name another one are void."""
    held: list[GroupBlocks] = field(default_factory=list)
    """Its blocks, one entry per group of layers; empty unless running."""
    room: int = 0
    """Tokens that it can have computed before its blocks must be looked at again: as many as they hold, or fewer where a
    state is to be kept."""
    begins_at: int = 0
    """Tokens behind which it went on from a state that was found, or from nothing."""
    keep_at: int | None = None
    """Tokens behind which its state is kept for others next (`quintet.core.recurrent_state`)."""
    num_kept: int = 0
    """Tokens of its beginning that were to outlive its preemption, in every group as many as it can go on from."""
    unnamed: list[tuple[int, list[int]]] = field(default_factory=list)
    """States that were kept behind tokens of which not all are known: so many tokens, and a block per group of states."""
    for_choices: list[int] = field(default_factory=list)
    """A block per group of states, with the state that further choices begin with; of a first choice."""
    digests: list[bytes] = field(default_factory=list)
    """Hash chain of its full blocks, as far as it was needed."""
    register_at: int = 0
    """Tokens planned, of known value, from which another full block is due for the prefix cache."""

    scheduled_ns: int | None = None
    """When the first step that computes it was planned."""
    first_token_ns: int | None = None
    """When the first token drawn for it was committed."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    opened: bool = False
    """Whether its detokenizer has heard of it."""
    prompt_logprobs_end: int = 1
    """Prompt position before which all log-probabilities were passed on (the first has none)."""
    num_computed: int = 0
    """Prompt tokens that it had to compute when it was first scheduled."""
    num_preemptions: int = 0
    num_open: int = 1
    """Choices that have not ended, of a first choice."""
    longest: int = 0
    """Most outputs of a choice that has ended, of a first choice."""

    @property
    def first_id(self) -> int:
        """Id of the first choice of the original request."""
        return self.request_id - self.choice

    @property
    def num_outputs(self) -> int:
        """Output tokens that are known."""
        return len(self.tokens) - self.num_prompt

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end the request, in the order in which they were given."""
        return list(self.stops)
