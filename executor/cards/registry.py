"""Every architecture Quintet knows, by the name a card gives it.

One table for everybody: `deploy` reads a card with it before anything is started, the executor builds the model from what the
same function read. Imports no torch. A file of ``families/`` has the architectures of one lineage.
"""

from __future__ import annotations

from quintet.executor.cards.families import llama, routed
from quintet.executor.cards.family import Family

FAMILIES: dict[str, Family] = {**llama.FAMILIES, **routed.FAMILIES}
"""By the card's architecture."""
