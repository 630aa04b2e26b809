"""Requests from admission to their ending, alone and together."""

from __future__ import annotations

import pytest

from .fake import World, expected

PROMPT = list(range(10, 21))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_gets_its_tokens(depth: int) -> None:
    world = World(depth=depth)
    world.admit(5, PROMPT, max_tokens=6)
    world.run()
    assert world.outcomes[5].tokens == expected(PROMPT, 5, 6)
    world.assert_idle()
