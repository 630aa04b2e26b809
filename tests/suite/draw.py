"""What the fast suite takes of each test's combinations, drawn by a seed that is printed; ``--whole`` takes all of them.

Of a test with several parameters (its fixtures' too) the fast suite takes combinations in which every value of every
parameter occurs; of one marked ``drawn(count)``, so many combinations; of one marked ``whole``, nothing. A test that is
named on the command line is taken as it is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.suite.packages import package_of

SEED = "--seed"
SHARES = {"models": 1 / 3, "cuda": 1 / 3, "gguf": 1 / 2, "executor": 2 / 3}
"""Of folders whose tests repeat one procedure for many shapes: the share of each file's drawn tests in the fast suite."""

Value = tuple[tuple[str, int], ...]
"""Of one parameter or of several that are given together: names and objects."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite", "what is taken of the suite")
    group.addoption("--whole", action="store_true", help="every combination of parameters, every slow kind")
    group.addoption(SEED, type=int, help="what the combinations are drawn by (default: another each time)")
    group.addoption(
        "--share", type=float, default=1.0, help="of what is taken so, draw this share of each file"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole: only in the whole suite")
    config.addinivalue_line("markers", "drawn(count): so many combinations of parameters in the fast suite")
    if config.option.seed is None:
        worker = getattr(config, "workerinput", {})  # only of a worker of pytest-xdist
        config.option.seed = worker.get(SEED, random.SystemRandom().randrange(1_000_000))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers draw by one seed."""
    node.workerinput[SEED] = node.config.option.seed


def is_named(config: pytest.Config) -> bool:
    """Whether tests were picked by name, rather than files and folders of them."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.whole or is_named(config):
        taken = set(items)
    else:
        taken = set(thinned(fast_suite(items, config.option.seed), config.option.seed))
    if config.option.share < 1:
        taken = set(share_of(taken_in_order(items, taken), config.option.share, config.option.seed))
    left_out = [item for item in items if item not in taken]
    if left_out:
        items[:] = taken_in_order(items, taken)
        config.hook.pytest_deselected(items=left_out)


def taken_in_order(items: Iterable[pytest.Item], taken: set[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if item in taken]


def fast_suite(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return what the fast suite takes of these tests."""
    chosen: list[pytest.Item] = []
    cheap = (item for item in items if item.get_closest_marker("whole") is None)
    for function, group in itertools.groupby(cheap, function_of):
        combinations = list(group)
        rng = random.Random(f"{seed} {function}")
        if drawn := combinations[0].get_closest_marker("drawn"):
            (count,) = drawn.args
            chosen += rng.sample(combinations, min(count, len(combinations)))
        else:
            places = cover([values_of(item) for item in combinations], rng)
            chosen += [combinations[place] for place in places]
    return chosen


def thinned(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests without those that a folder's share leaves out."""
    chosen: list[pytest.Item] = []
    for folder, group in itertools.groupby(items, lambda item: package_of(item.path)):
        tests = list(group)
        share = SHARES.get(folder, 1.0)
        chosen += tests if share == 1 else share_of(tests, share, seed)
    return chosen


def share_of(items: Sequence[pytest.Item], share: float, seed: int) -> list[pytest.Item]:
    """Return so large a share of each file's tests, one at least."""
    chosen: list[pytest.Item] = []
    for path, group in itertools.groupby(items, lambda item: item.path):
        tests = list(group)
        chosen += random.Random(f"{seed} {path.name}").sample(tests, max(1, round(share * len(tests))))
    return chosen


def cover(combinations: Sequence[Collection[Value]], rng: random.Random) -> list[int]:
    """Return the places of combinations in which each value of each parameter occurs: few, and drawn."""
    order = list(range(len(combinations)))
    rng.shuffle(order)
    missing = set(itertools.chain.from_iterable(combinations))
    chosen = [] if missing else order[:1]
    while missing:
        best = max(order, key=lambda place: len(missing.intersection(combinations[place])))
        missing.difference_update(combinations[best])
        chosen.append(best)
    return chosen


def function_of(item: pytest.Item) -> str:
    """The test's name without its parameters."""
    return item.nodeid.partition("[")[0]


def values_of(item: pytest.Item) -> list[Value]:
    """The values of the test's parameters; those that one decorator gives together are one value."""
    callspec = getattr(item, "callspec", None)  # only of a test that has parameters
    if callspec is None:
        return []
    together = [names_in(mark.args[0]) for mark in item.iter_markers("parametrize")]
    single = [(name,) for name in callspec.params.keys() - set(itertools.chain.from_iterable(together))]
    return [tuple((name, id(callspec.params[name])) for name in names) for names in (*together, *single)]


def names_in(names: str | Sequence[str]) -> tuple[str, ...]:
    """As the decorator was given them: a list, or with commas between."""
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
