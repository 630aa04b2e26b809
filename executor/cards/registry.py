"""Every architecture Quintet knows, by the name a card gives it.

One table for everybody: `deploy` reads a card with it before anything is started, the executor builds the model from what the
same function read. Imports no torch. A file of ``families/`` has the architectures of one lineage.
"""

from __future__ import annotations

import difflib
import re

from quintet.executor.cards.families import (
    cohere,
    dense,
    departed,
    falcon,
    gemma,
    glm,
    gpt,
    hunyuan,
    hybrid,
    latent,
    lfm,
    llama,
    llama4,
    mamba,
    mpt,
    nemotron,
    olmo,
    openai,
    opt,
    phi,
    qwen_next,
    routed,
    sigmoid_routed,
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
    **nemotron.FAMILIES,
    **hunyuan.FAMILIES,
    **hybrid.FAMILIES,
    **lfm.FAMILIES,
    **olmo.FAMILIES,
    **openai.FAMILIES,
    **opt.FAMILIES,
    **departed.FAMILIES,
    **phi.FAMILIES,
    **qwen_next.FAMILIES,
    **routed.FAMILIES,
    **sigmoid_routed.FAMILIES,
    **text_of.FAMILIES,
}
"""By the card's architecture."""

_VERSION = re.compile(r"[0-9]{1,3}(_[0-9]{1,2})?")
_ENDINGS = ("LMHeadModel", "Model")


def nearest(architecture: str) -> str | None:
    """Return the known architecture whose name is most like this one, what it is for left aside; None where none is.

    Of those that differ in their version alone it is the one with the nearest.
    """
    names, lineage = {_lineage(name): name for name in reversed(FAMILIES)}, _lineage(architecture)
    near = difflib.get_close_matches(lineage, names, n=1, cutoff=0.6)
    if not near:
        return None
    versions = [each for each in names if _without_version(each) == _without_version(near[0])]
    return names[min(versions, key=lambda each: abs(_version(each) - _version(lineage)))]


def _lineage(architecture: str) -> str:
    """Return the part of a name that says whose it is."""
    name, _, _ = architecture[:200].partition("For")
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name.lower().strip("_")


def _version(lineage: str) -> float:
    """Return the first number in a name, 3.5 of qwen3_5moe; the first version has none."""
    found = _VERSION.search(lineage)
    return float(found[0].replace("_", ".")) if found else 1.0


def _without_version(lineage: str) -> str:
    return _VERSION.sub("", lineage, count=1)
