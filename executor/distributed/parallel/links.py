"""Links between pipeline stages, from each stage to the next and from the last to the first.

    stage 0 ── link 0: steps, hidden states ──▶ stage 1 ── … ──▶ stage M - 1
       ▲                                                             │
       └───────────────── link M - 1: logits ────────────────────────┘

A link is memory of two ranks without collectives. An order's payload is the input of the next stage. Two orders may
be in flight to a stage, so that it never waits between steps. As many orders as there are stages may be in flight to
the first stage, which takes logits when it needs them. It starts a step only after taking the logits of the step that
many before, which excludes a deadlock.

A link between two hosts has memory on both (`quintet.executor.distributed.hosts`); the stages work the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import Share

SENDER, RECEIVER = Share(0, 2), Share(1, 2)


@dataclass(frozen=True, slots=True)
class Links:
    """The two links of one stage."""

    preceding: Ranks
    """Receives from the previous stage."""
    following: Ranks
    """Sends to the next stage."""
