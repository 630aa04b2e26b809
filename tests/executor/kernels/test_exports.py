"""Hand-written declarations in C++ test programs equal the library's exports: the linker does not compare arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_EXPORTED = re.compile(r"QT_EXPORT ([^;{]*?\bqt_\w+\([^)]*\))\s*\{")
_DECLARED = re.compile(r"^((?:const )?[\w:]+\*? qt_\w+\([^)]*\));", re.MULTILINE)
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests/executor").rglob("*.cpp")
    if _DECLARED.search(path.read_text())
)


def signatures(texts: list[str], pattern: re.Pattern[str]) -> dict[str, str]:
    """Return result and argument types by function name, without names and spaces."""
    found = {}
    for signature in (match for text in texts for match in pattern.findall(text)):
        result, name, taken = re.fullmatch(r"(.*?)\b(qt_\w+)\((.*)\)", signature, re.DOTALL).groups()  # type: ignore[union-attr]
        kinds = [re.sub(r"\w+$", "", each.strip()) for each in taken.split(",") if each.strip()]
        found[name] = re.sub(r"\s|\bqt::", "", f"{result}({','.join(kinds)})")
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_declares_what_the_library_exports(program: str) -> None:
    exported = signatures([path.read_text() for path in (ROOT / "csrc/cpu").rglob("*.cpp")], _EXPORTED)
    declared = signatures([(ROOT / program).read_text()], _DECLARED)
    assert declared == {name: exported.get(name) for name in declared}
