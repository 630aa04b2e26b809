"""Selection of parameter combinations for the fast suite, drawn by a printed seed; ``--whole`` takes all.

Of a test with several parameters (its fixtures' too), the fast suite takes combinations in which every value of every
parameter occurs. ``drawn(count)``: this many combinations. ``whole``: none. A test named on the command line runs
unchanged.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.suite.packages import package_of

SEED = "--seed"
SHARES = {
    **dict.fromkeys(("models", "cuda"), 1 / 4),
    **dict.fromkeys(("executor", "gguf"), 1 / 2),
    **dict.fromkeys(("api", "chaos", "deploy", "processes"), 2 / 3),
}
"""Folders with slow tests, or with tests that repeat one procedure for many shapes. The value is the share of each file's
drawn tests in the fast suite.
"""

Value = tuple[tuple[str, int], ...]
"""Value of one parameter, or of several parametrized together: names and objects."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite", "selection of the suite")
    group.addoption(
        "--whole", action="store_true", help="run every combination of parameters and every slow test"
    )
    group.addoption(SEED, type=int, help="seed of the selection (default: random)")
    group.addoption(
        "--share", type=float, default=1.0, help="run this share of the selected tests of each file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole: only in the whole suite")
    config.addinivalue_line("markers", "drawn(count): this many combinations of parameters in the fast suite")
    if config.option.seed is None:
        worker = getattr(config, "workerinput", {})  # only in a worker of pytest-xdist
        config.option.seed = worker.get(SEED, random.SystemRandom().randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give all workers one seed."""
    node.workerinput[SEED] = node.config.option.seed


def is_named(config: pytest.Config) -> bool:
    """Return True if tests were selected by name, not only by file or folder."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.whole or is_named(config):
        taken = set(items)
    else:
        taken = set(sampled_tests(fast_suite(items, config.option.seed), config.option.seed))
    if config.option.share < 1:
        taken = set(share_of(selected_in_order(items, taken), config.option.share, config.option.seed))
    deselected = [item for item in items if item not in taken]
    if deselected:
        items[:] = selected_in_order(items, taken)
        config.hook.pytest_deselected(items=deselected)


def selected_in_order(items: Iterable[pytest.Item], taken: set[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item in taken]


def fast_suite(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests of the fast suite."""
    chosen: list[pytest.Item] = []
    cheap = (item for item in items if item.get_closest_marker("whole") is None)
    for function, group in itertools.groupby(cheap, function_of):
        combinations = list(group)
        rng = random.Random(f"{seed} {function}")
        if drawn := combinations[0].get_closest_marker("drawn"):
            (count,) = drawn.args
            chosen += rng.sample(combinations, min(count, len(combinations)))
        else:
            indexes = cover([values_of(item) for item in combinations], rng)
            chosen += [combinations[index] for index in indexes]
    return chosen


def sampled_tests(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests without those that a folder's share drops."""
    chosen: list[pytest.Item] = []
    for folder, group in itertools.groupby(items, lambda item: package_of(item.path)):
        tests = list(group)
        share = SHARES.get(folder, 1.0)
        chosen += tests if share == 1 else share_of(tests, share, seed)
    return chosen


def share_of(items: Sequence[pytest.Item], share: float, seed: int) -> list[pytest.Item]:
    """Return this share of each file's tests, at least one."""
    chosen: list[pytest.Item] = []
    for path, group in itertools.groupby(items, lambda item: item.path):
        tests = list(group)
        chosen += random.Random(f"{seed} {path.name}").sample(tests, max(1, round(share * len(tests))))
    return chosen


def cover(combinations: Sequence[Collection[Value]], rng: random.Random) -> list[int]:
    """Return indexes of few random combinations in which each value of each parameter occurs."""
    order = list(range(len(combinations)))
    rng.shuffle(order)
    missing = set(itertools.chain.from_iterable(combinations))
    chosen = [] if missing else order[:1]
    while missing:
        best = max(order, key=lambda index: len(missing.intersection(combinations[index])))
        missing.difference_update(combinations[best])
        chosen.append(best)
    return chosen


def function_of(item: pytest.Item) -> str:
    """Return the test's name without its parameters."""
    return item.nodeid.partition("[")[0]


def values_of(item: pytest.Item) -> list[Value]:
    """Return the test's parameter values; values of one decorator count as one."""
    callspec = getattr(item, "callspec", None)  # only of a test with parameters
    if callspec is None:
        return []
    together = [names_in(mark.args[0]) for mark in item.iter_markers("parametrize")]
    single = [(name,) for name in callspec.params.keys() - set(itertools.chain.from_iterable(together))]
    return [tuple((name, id(callspec.params[name])) for name in names) for names in (*together, *single)]


def names_in(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names as the decorator received them: a list, or comma-separated."""
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
