"""What the fast suite draws, on test files written for it."""

from __future__ import annotations

import random
import subprocess
import sys
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

@pytest.mark.whole
def test_slow():
    pass

def test_plain():
    pass
"""


def run(folder: Path, *options: str) -> list[str]:
    """Run the file with the suite's own plugins; return which tests passed, in order."""
    (folder / "test_file.py").write_text(FILE)
    plugins = [part for name in ("draw", "alone", "costs") for part in ("-p", f"tests.suite.{name}")]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-c",
            "/dev/null",
            *plugins,
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " PASSED" in line]
    return [word.partition("::")[2] for line in lines for word in line if "::" in word]


def test_every_value_of_every_parameter_is_taken(tmp_path: Path) -> None:
    taken = [name for name in run(tmp_path, "--seed", "1", str(tmp_path)) if "covered" in name]
    assert 5 <= len(taken) <= 10
    for value in ("x", "y", *map(str, range(5)), "1-1", "1-2", "2-1", "2-2"):
        assert any(value in name for name in taken), (value, taken)


def test_marks_say_how_many_are_taken(tmp_path: Path) -> None:
    taken = run(tmp_path, str(tmp_path))
    assert sum("test_drawn" in name for name in taken) == 2
    assert "test_plain" in taken
    assert "test_slow" not in taken


def test_the_whole_suite_takes_everything(tmp_path: Path) -> None:
    assert len(run(tmp_path, "--whole", str(tmp_path))) == 2 * 5 * 4 + 2 * 5 + 2


def test_a_seed_draws_the_same_again_and_workers_draw_alike(tmp_path: Path) -> None:
    first, again = (run(tmp_path, "--seed", "7", str(tmp_path)) for _ in range(2))
    assert first == again
    assert sorted(run(tmp_path, "--seed", "7", "-n", "2", str(tmp_path))) == sorted(first)
    assert len(run(tmp_path, "-n", "2", str(tmp_path))) > 5  # with a seed that nobody gave


def test_what_is_named_is_run(tmp_path: Path) -> None:
    assert run(tmp_path, f"{tmp_path}/test_file.py::test_slow") == ["test_slow"]
    assert len(run(tmp_path, "-k", "test_drawn", str(tmp_path))) == 10


def test_a_share_of_a_file_is_one_test_at_least(tmp_path: Path) -> None:
    assert len(run(tmp_path, "--whole", "--share", "0.5", str(tmp_path))) == 26
    assert len(run(tmp_path, "--share", "0.001", str(tmp_path))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_cover_is_small(seed: int) -> None:
    combinations = [
        [(("a", a),), (("b", b),), (("c", c),)] for a in range(6) for b in range(4) for c in range(2)
    ]
    chosen = cover(combinations, random.Random(seed))
    assert 6 <= len(chosen) <= 9
    assert {value for place in chosen for value in combinations[place]} == {
        v for c in combinations for v in c
    }
