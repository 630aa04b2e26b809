"""What a stage tells the next one, and the last one the first: memory of two ranks that never meet.

    stage 0 ── link 0: steps, hidden states ──▶ stage 1 ── … ──▶ stage M - 1
       ▲                                                             │
       └───────────────── link M - 1: logits ────────────────────────┘

An order's payload is what the next stage goes on with. Two orders may be under way to a stage, so that it finds the next one when
it has done one; and to the first stage as many as there are stages, since it takes a step's logits when it wants to. It begins no
step before it has taken those of the step as many before it, so nobody waits in a circle.

Between stages on two hosts each has memory of its own for the link (`quintet.executor.distributed.hosts`): no stage knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import Share

TELLER, HEARER = Share(0, 2), Share(1, 2)


@dataclass(frozen=True, slots=True)
class Links:
    """One stage's two."""

    before: Ranks
    """What it hears."""
    behind: Ranks
    """What it tells."""
