"""Reconciliation: a difference between two processes counts from the second report on."""

from __future__ import annotations

from quintet.core.reconcile import Reconciler

from .fake import World

PROMPT = list(range(10, 21))


def test_difference_counts_in_second_report() -> None:
    auditors = Reconciler()
    first = auditors.compare((0, 1), [1, 2, 3], [2, 3, 4])
    assert first == ([], [])
    second = auditors.compare((0, 1), [1, 2, 5], [2, 4, 6])
    assert second == ([4], [1])
    third = auditors.compare((0, 1), [2, 5], [2, 6, 5])
    assert third == ([6], [])


def test_replaced_process_starts_without_differences() -> None:
    auditors = Reconciler()
    auditors.compare((0, 1), [1], [])
    assert auditors.compare((0, 2), [1], []) == ([], [])
    assert auditors.compare((1, 1), [1], []) == ([], [])
    assert auditors.compare((0, 2), [1], []) == ([], [1])


def test_request_without_frontend_is_freed() -> None:
    world = World()
    world.admit(1, PROMPT, ignore_eos=True)
    world.admit(2, PROMPT, ignore_eos=True)
    world.step()
    assert world.engine.opened() == [(0, 1), (0, 2)]
    effects = world.engine.drop([1, 99], world.tick())
    [(_, tokens)] = effects.tokens
    assert tokens.closed and not tokens.finishes
    world.run()
    assert world.outcomes[1].num_endings == 0 and world.outcomes[2].num_endings == 1
    world.assert_idle()
