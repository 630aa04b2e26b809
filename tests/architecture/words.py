"""Banned words in identifiers, prose and messages: `python -m tests.architecture.words [PATH …]` lists them.

The rule is in CONTRIBUTING.md: the field's standard terms, components as subjects.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORDS = frozenset(
    (
        *("who", "whom", "whose", "whoever", "whomever", "nobody", "somebody", "everybody"),
        *("told", "tells", "untold", "foretold", "neighbour", "neighbours", "neighbouring"),
        *("seat", "seats", "doorman", "doorbell", "nursery", "patience", "lookers"),
    )
)
"""Not to be used as a word of an identifier or of prose."""
PHRASES = (
    *(
        "goes on",
        "go on",
        "gone on",
        "going on",
        "let go",
        "lets go",
        "as ever",
        "one by one is",
        "it is none",
    ),
    *("is none that", "makes of", "stands for itself", "comes back for"),
)
"""Not to be used in prose."""
ALLOWED: dict[tuple[str, str], str] = {
    ("frontend/resume/token_relay.py", "told"): "a comment of resumable streams that other versions read",
    ("deploy/router/events.py", "told"): "the same comment",
    ("deploy/supervisor/startup_log.py", "who"): "a prompt to try: Who are you?",
    ("csrc/cuda/codes.cuh", "who"): "the title of a paper",
    ("bench/chaos/overload.py", "told"): "a variant in recorded results",
    ("bench/chaos/overload.py", "untold"): "a variant in recorded results",
    ("bench/embedded/corpus.py", "who"): "a question in the training text",
}
"""Exceptions by path and word, each with its reason."""
FOLDERS = (
    *("wire", "process", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "deploy"),
    *("csrc", "bench", "docs", "src", ".github"),
)
SUFFIXES = {".py", ".md", ".cpp", ".hpp", ".cu", ".cuh", ".yaml", ".yml", ".sh", ".toml"}
_WORD = re.compile(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])")
_PHRASE = re.compile(r"\b(" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_BEGINS_AS_A_QUESTION = re.compile(r"^(what|which|how|whether|who|where|when)\b", re.IGNORECASE)


class Hit(NamedTuple):
    """A banned word and its place."""

    path: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}"


def files(*folders: str) -> list[Path]:
    """Return the files that are checked."""
    listed = subprocess.run(
        ["git", "ls-files", *(folders or (*FOLDERS, "*.md"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        ROOT / name
        for name in dict.fromkeys(listed.stdout.splitlines())
        if Path(name).suffix in SUFFIXES
        and not name.startswith(("bench/results/", "frontend/swagger/", "tests/"))
        and not (ROOT / name).is_symlink()
    ]


def hits_in(path: Path) -> Iterator[Hit]:
    """Yield the banned words of a file."""
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    if path.suffix == ".md":
        text = _CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        for word in _WORD.findall(line):
            if word.lower() in WORDS and (name, word.lower()) not in ALLOWED:
                yield Hit(name, number, word)
        for phrase in _PHRASE.findall(line):
            if (name, phrase.lower()) not in ALLOWED:
                yield Hit(name, number, phrase)


def questions_in(path: Path) -> Iterator[Hit]:
    """Yield the docstrings of a Python file whose first line begins like a question."""
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            first = token.string.strip("rR\"'").lstrip()
            if found := _BEGINS_AS_A_QUESTION.match(first):
                yield Hit(str(path.relative_to(ROOT)), token.start[0], f"docstring begins with {found[1]}")
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type


def main() -> None:
    """Print the hits, and how many there are by word."""
    counts: dict[str, int] = {}
    for path in files(*sys.argv[1:]):
        found = [*hits_in(path), *(questions_in(path) if path.suffix == ".py" else ())]
        for hit in found:
            counts[hit.word.lower()] = counts.get(hit.word.lower(), 0) + 1
            print(hit)
    print(dict(sorted(counts.items(), key=lambda pair: -pair[1])), sum(counts.values()))


if __name__ == "__main__":
    main()
