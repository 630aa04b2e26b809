"""Shared beginnings on two engines that could hold all of them between them, in virtual time."""

from __future__ import annotations

from bench.routing.simulated_cores import Play, counting


def test_engines_do_not_drive_out_each_others_beginnings() -> None:
    """They do where what is displaced counts nothing: then both compute what one of them had."""
    for order in range(2):
        assert Play(8, order).hit_rate() > 0.9
    with counting(0.0):
        assert Play(8, 0).hit_rate() < 0.8
