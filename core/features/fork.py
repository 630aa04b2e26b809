"""Forks: the further choices of a request with n > 1 begin from the first one's prompt.

They wait until the first choice has computed the prompt up to its last token. Then each shares the full blocks, copies
the one partly filled block (it is about to write into it), and computes the last prompt token itself, so that it draws
its first token with its own seed. A choice whose elder is gone before there was room for it is a request like any
other: the prefix cache or the prompt itself serve it.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Found, Setup
from quintet.core.request import Request, Status
from quintet.core.state import State


def build(setup: Setup) -> Feature | None:
    """Forks are always on: only requests that have a parent notice."""
    return Feature("fork", gate=gate, source=source)


def gate(state: State, request: Request) -> bool:
    """Hold a choice back while its elder is still on its way through the prompt, unless a trial keeps the elder from it."""
    parent = request.parent
    return (
        parent is None
        or parent.status is Status.ENDED
        or parent.computed >= parent.num_prompt - 1
        or not state.may_run(parent)
    )


def source(state: State, request: Request) -> Found | None:
    """Find the prompt in the blocks of the elder, if it runs and has computed them."""
    parent = request.parent
    num_tokens = request.num_prompt - 1
    if parent is None or parent.status is not Status.RUNNING or parent.computed < num_tokens:
        return None
    num_full, remainder = divmod(num_tokens, state.limits.block_size)
    if len(request.digests) < num_full:
        request.digests = parent.digests[:num_full]  # the same tokens: hash them once
    tail = parent.blocks[num_full] if remainder else None
    return Found(num_tokens, parent.blocks[:num_full], tail, num_cached=parent.num_cached)
