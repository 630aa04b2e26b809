"""Every architecture Quintet knows, by the name a card gives it.

One table for everybody: `deploy` reads a card with it before anything is started, the executor builds the model from what the
same function read. Imports no torch. A file of ``families/`` has the architectures of one lineage.
"""

from __future__ import annotations

import difflib

from quintet.executor.cards.families import (
    cohere,
    dense,
    departed,
    falcon,
    gemma,
    glm,
    gpt,
    hybrid,
    latent,
    lfm,
    llama,
    llama4,
    mamba,
    mpt,
    olmo,
    openai,
    opt,
    phi,
    qwen_next,
    routed,
    text_of,
)
from quintet.executor.cards.family import Family

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **cohere.FAMILIES,
    **mamba.FAMILIES,
    **dense.FAMILIES,
    **falcon.FAMILIES,
    **gemma.FAMILIES,
    **glm.FAMILIES,
    **gpt.FAMILIES,
    **latent.FAMILIES,
    **llama4.FAMILIES,
    **mpt.FAMILIES,
    **hybrid.FAMILIES,
    **lfm.FAMILIES,
    **olmo.FAMILIES,
    **openai.FAMILIES,
    **opt.FAMILIES,
    **departed.FAMILIES,
    **phi.FAMILIES,
    **qwen_next.FAMILIES,
    **routed.FAMILIES,
    **text_of.FAMILIES,
}
"""By the card's architecture."""

_ENDINGS = ("LMHeadModel", "Model")


def nearest(architecture: str) -> str | None:
    """Return the known architecture whose name is most like this one, what it is for left aside; None where none is."""
    names = {_lineage(name): name for name in reversed(FAMILIES)}
    near = difflib.get_close_matches(_lineage(architecture), names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def _lineage(architecture: str) -> str:
    """Return the part of a name that says whose it is."""
    name, _, _ = architecture[:200].partition("For")
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name.lower().strip("_")
