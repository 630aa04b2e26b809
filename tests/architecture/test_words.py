"""Names and prose use the field's standard terms: no banned words, no docstrings that begin like questions."""

from __future__ import annotations

import subprocess

import pytest
from tests.architecture.words import (
    MAX_LONG_SHARE,
    MAX_WORDS,
    ROOT,
    files,
    hits_in,
    num_words,
    prose_pages,
    questions_in,
    sentences,
)

FOLDERS = (
    "wire",
    "process",
    "frontend",
    "tokenizer_proc",
    "core",
    "executor",
    "detokenizer_proc",
    "deploy",
    "csrc",
    "bench",
    "src",
    "tests",
    ".github",
)


@pytest.mark.parametrize("name", (*FOLDERS, "*.md"))
def test_no_banned_words(name: str) -> None:
    assert [str(hit) for path in files(name) for hit in hits_in(path)] == []


def test_no_marks_of_merge_conflicts() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_do_not_begin_like_questions(folder: str) -> None:
    found = [hit for path in files(folder) if path.suffix == ".py" for hit in questions_in(path)]
    assert [str(hit) for hit in found] == []


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in prose_pages()])
def test_few_sentences_are_long(page: str) -> None:
    all_of = list(sentences((ROOT / page).read_text()))
    long = [sentence for sentence in all_of if num_words(sentence) > MAX_WORDS]
    assert len(long) <= MAX_LONG_SHARE * len(all_of), long


def test_sentences_of_a_page() -> None:
    page = """# A heading. Not a sentence

The first, e.g. of two. `LLM(model, seed=1)` is
one word. It costs 1.5 ms: see
[the page](page.md#of-many-words).

| A table. | Not a sentence. |

* An item without a full stop
  on two lines
* **Bold.** Another one.

    python -m indented.code

```
Code. More code.
```
<!-- A comment. -->
"""
    assert list(sentences(page)) == [
        "The first, e.g of two.",
        "`code` is one word.",
        "It costs 1.5 ms: see the page.",
        "An item without a full stop on two lines",
        "**Bold.",
        "Another one.",
    ]
    assert num_words("`code` is one word – or two.") == 6
