"""Banned words in identifiers, prose and messages: `python -m tests.architecture.words [PATH …]` lists them.

`python -m tests.architecture.words --long [PATH …]` lists the long sentences of pages.
The rule is in CONTRIBUTING.md: the field's standard terms, components as subjects, at most 25 words a sentence.
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
"""Banned as words of identifiers and prose."""
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
"""Banned in prose."""
ALLOWED: dict[tuple[str, str], str] = {
    ("frontend/resume/token_relay.py", "told"): "a comment of resumable streams that other versions read",
    ("deploy/router/events.py", "told"): "the same comment",
    ("deploy/supervisor/startup_log.py", "who"): "a prompt to try: Who are you?",
    ("csrc/cuda/codes.cuh", "who"): "the title of a paper",
    ("bench/chaos/overload.py", "told"): "a variant in recorded results",
    ("bench/chaos/overload.py", "untold"): "a variant in recorded results",
    ("tests/deploy/router/test_failover.py", "told"): "the comment of resumable streams",
    ("tests/http_api/test_token_relay.py", "told"): "the comment of resumable streams",
    ("tests/http_api/test_token_relay_responses.py", "told"): "the comment of resumable streams",
    ("bench/embedded/corpus.py", "who"): "a question in the training text",
}
"""Exceptions by path and word, each with its reason."""
FOLDERS = (
    *("wire", "process", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "deploy"),
    *("csrc", "bench", "docs", "src", "tests", ".github"),
)
PROSE = (
    *("docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "csrc/README.md", "tests/README.md"),
    *("bench/README.md", "bench/*/README.md"),
)
"""Pages with a limit on long sentences."""
SUFFIXES = {".py", ".md", ".cpp", ".hpp", ".cu", ".cuh", ".yaml", ".yml", ".sh", ".toml"}
_WORD = re.compile(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])")
_PHRASE = re.compile(r"\b(" + "|".join(PHRASES) + r")\b", re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MAX_WORDS = 25
"""A longer sentence is a long one."""
MAX_LONG_SHARE = 0.05
"""Largest share of long sentences in a page."""
_NO_PROSE = re.compile(r"<!--.*?-->|^ *```.*?^ *```|^ *~~~.*?^ *~~~", re.MULTILINE | re.DOTALL)
_NO_PROSE_LINE = re.compile(r"\s*(\||#+ |<)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_INLINE_CODE = re.compile(r"`[^`]+`")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|etc|approx)\.")
_END = re.compile(r"(?<=[.!?])[*_)\"”]*\s+(?=[\"“*_(\[]*[A-Z0-9`])")
_BEGINS_AS_A_QUESTION = re.compile(r"^(what|which|how|whether|who|where|when)\b", re.IGNORECASE)


class Hit(NamedTuple):
    """A banned word and its position."""

    path: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}"


def files(*folders: str) -> list[Path]:
    """Return the checked files."""
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
        and not name.startswith(("bench/results/", "frontend/rapidoc/", "tests/architecture/words.py"))
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


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page, without code, tables, headings and HTML."""
    lines: list[str] = []
    is_code = False
    for line in (*_NO_PROSE.sub("", text).splitlines(), ""):
        is_item = _ITEM.match(line) is not None
        is_code = line.startswith("    ") and not is_item and (is_code or not lines)
        if is_item or is_code or not line.strip() or _NO_PROSE_LINE.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not is_code and not _NO_PROSE_LINE.match(line):
            lines.append(_ITEM.sub("", line, count=1).strip() if is_item else line.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page. Inline code is one word: ``code``."""
    for paragraph in paragraphs(text):
        plain = _ABBREVIATION.sub(r"\1", _LINK.sub(r"\1", _INLINE_CODE.sub("`code`", paragraph)))
        yield from (sentence for sentence in _END.split(plain) if re.search(r"\w", sentence))


def num_words(sentence: str) -> int:
    """Count the words of a sentence."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def prose_pages(*names: str) -> list[Path]:
    """Return the pages with rules for sentences; generated pages, raw results and notes are not among them."""
    listed = subprocess.run(
        ["git", "ls-files", *(names or PROSE)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        ROOT / name
        for name in listed.stdout.splitlines()
        if name.endswith(".md") and not name.startswith(("docs/reference/", "bench/results/"))
    ]


def print_long_sentences(*names: str) -> None:
    """Print the long sentences of pages, and their share."""
    for path in prose_pages(*names):
        all_of = list(sentences(path.read_text()))
        long = [sentence for sentence in all_of if num_words(sentence) > MAX_WORDS]
        print(
            f"{path.relative_to(ROOT)}: {len(long)} of {len(all_of)}, {len(long) / max(1, len(all_of)):.1%}"
        )
        for sentence in long:
            print(f"    {num_words(sentence)}: {sentence}")


def main() -> None:
    """Print the hits, and their counts by word."""
    if sys.argv[1:2] == ["--long"]:
        print_long_sentences(*sys.argv[2:])
        return
    counts: dict[str, int] = {}
    for path in files(*sys.argv[1:]):
        found = [*hits_in(path), *(questions_in(path) if path.suffix == ".py" else ())]
        for hit in found:
            counts[hit.word.lower()] = counts.get(hit.word.lower(), 0) + 1
            print(hit)
    print(dict(sorted(counts.items(), key=lambda pair: -pair[1])), sum(counts.values()))


if __name__ == "__main__":
    main()
