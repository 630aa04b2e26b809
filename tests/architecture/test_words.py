"""Names and prose use the field's standard terms: no banned words, no docstrings that begin like questions."""

from __future__ import annotations

import pytest
from tests.architecture.words import files, hits_in, questions_in

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
    ".github",
)
PAGES = (
    "README.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/getting-started",
    "docs/developers",
    "docs/operations.md",
    "docs/reliability.md",
    "docs/replicas.md",
    "docs/kv.md",
    "docs/index.md",
    "docs/disaggregation.md",
    "docs/shared.md",
    "docs/route.md",
    "docs/deploy.md",
    "docs/responses.md",
    "docs/tools.md",
    "docs/structured.md",
    "docs/completions.md",
    "docs/anthropic.md",
    "docs/chat-templates.md",
    "docs/clients.md",
    "docs/fallback.md",
    "docs/models.md",
    "docs/quantization.md",
    "docs/vllm-flags.md",
)


@pytest.mark.parametrize("name", (*FOLDERS, *PAGES))
def test_no_banned_words(name: str) -> None:
    assert [str(hit) for path in files(name) for hit in hits_in(path)] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_do_not_begin_like_questions(folder: str) -> None:
    found = [hit for path in files(folder) if path.suffix == ".py" for hit in questions_in(path)]
    assert [str(hit) for hit in found] == []
