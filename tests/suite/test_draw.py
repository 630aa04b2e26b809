"""Selection of the fast suite, on generated test files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.suite.draw import cover

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import pytest

@pytest.fixture(params=["x", "y"])
def letter(request):
    return request.param

@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_covered(letter, number, a, b):
    assert a < 3

@pytest.mark.drawn(2)
@pytest.mark.parametrize("number", range(5))
def test_drawn(letter, number):
    pass

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_slow(size):
    pass

def test_plain():
    pass
"""


PLUGINS = ("-p", "tests.suite.draw")


@pytest.fixture
def file(pytester: pytest.Pytester) -> pytest.Pytester:
    """Folder with the file."""
    pytester.makepyfile(test_file=FILE)
    return pytester


def run(file: pytest.Pytester, *options: str) -> list[str]:
    """Run the file with the suite's own plugins; return the passed tests, in order."""
    passed, skipped, failed = file.inline_run(*PLUGINS, *options).listoutcomes()
    assert not skipped and not failed
    return [report.nodeid.partition("::")[2] for report in passed]


def test_every_value_of_every_parameter_is_taken(file: pytest.Pytester) -> None:
    taken = [name for name in run(file) if "covered" in name]
    assert 5 <= len(taken) <= 10
    for value in ("x", "y", *map(str, range(5)), "1-1", "1-2", "2-1", "2-2"):
        assert any(value in name for name in taken), (value, taken)


def test_marks_set_the_number_taken(file: pytest.Pytester) -> None:
    taken = run(file)
    assert sum("test_drawn" in name for name in taken) == 2
    assert sum("test_slow" in name for name in taken) == 1
    assert "test_plain" in taken


def test_the_whole_suite_takes_everything(file: pytest.Pytester) -> None:
    assert len(run(file, "--whole")) == 2 * 5 * 4 + 2 * 5 + 3


def test_seed_is_reproducible(file: pytest.Pytester) -> None:
    assert run(file, "--seed", "7") == run(file, "--seed", "7")
    assert len({tuple(run(file, "--seed", str(seed))) for seed in range(5)}) > 1


def test_workers_draw_alike(file: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist rejects workers with different tests; here without a given seed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # only named plugins take time
    result = file.runpytest_subprocess(*PLUGINS, "-p", "xdist", "-n", "2", "--tb", "short")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] > 5


def test_named_tests_run(file: pytest.Pytester) -> None:
    assert run(file, "test_file.py::test_slow") == ["test_slow[1]", "test_slow[2]"]
    assert len(run(file, "-k", "test_drawn")) == 10


def test_share_of_a_file_is_at_least_one_test(file: pytest.Pytester) -> None:
    assert len(run(file, "--whole", "--share", "0.5")) == 26
    assert len(run(file, "--share", "0.001")) == 1


@pytest.mark.parametrize("seed", range(20))
def test_cover_is_small(seed: int) -> None:
    combinations = [
        [(("a", a),), (("b", b),), (("c", c),)] for a in range(6) for b in range(4) for c in range(2)
    ]
    chosen = cover(combinations, random.Random(seed))
    assert 6 <= len(chosen) <= 9
    assert {value for place in chosen for value in combinations[place]} == {
        v for c in combinations for v in c
    }


def test_folders_with_shares_are_thinned(pytester: pytest.Pytester) -> None:
    tests = "\n".join(f"def test_{number}(): pass" for number in range(9))
    for folder in ("models", "core"):
        pytester.mkdir(folder).joinpath(f"test_{folder}.py").write_text(tests)
    assert len(run(pytester, "--seed", "1")) == 9 + 2
    assert len(run(pytester, "--whole")) == 18
