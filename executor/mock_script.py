"""Scripted answers of the mock executor, to test clients that act on answers without a real model.

The file is JSON: ``[{"after": "text of a prompt", "say": "answer"}, …]``. Texts include special tokens, as the chat
template and the model write them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quintet.wire.errors import ConfigError

NO_ANSWER = "The script has no answer to this prompt."
TAIL_CHARS = 40
"""The number of an answer's last characters searched in a prompt: chat templates remove reasoning before them."""


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One row of a script."""

    after: str
    """Prompt text that selects this answer: the latest match wins, unless the answer follows it already."""
    say: str


class MockScript:
    """Chooses the tokens of an answer by the text of its prompt."""

    def __init__(self, answers: list[Answer], tokenizer: Tokenizer, end_id: int) -> None:
        self._answers = answers
        self._tokenizer = tokenizer
        self._end_id = end_id

    def answer(self, prompt_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the answer's tokens followed by the end token."""
        prompt = self._tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
        found = [(at, row.say) for row in self._answers if (at := _match_position(row, prompt)) >= 0]
        say = max(found, default=(0, NO_ANSWER), key=lambda each: each[0])[1]
        ids = self._tokenizer.encode(say, add_special_tokens=False).ids
        return np.array([*ids, self._end_id], np.int32)


def _match_position(row: Answer, prompt: str) -> int:
    """Return the last position of a row's text in a prompt; -1 if absent or if the row's answer follows it."""
    at = prompt.rfind(row.after)
    return -1 if at >= 0 and prompt.find(row.say[-TAIL_CHARS:], at + len(row.after)) >= 0 else at


def read_mock_script(path: Path, tokenizer_file: Path, end_id: int) -> MockScript:
    """Read a script and the tokenizer that encodes it. Raises `ConfigError`."""
    try:
        answers = msgspec.json.decode(path.read_bytes(), type=list[Answer])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f'--mock-script {path} cannot be read: {error}; the file must be JSON: [{{"after": "…", "say": "…"}}]'
        ) from error
    return MockScript(answers, Tokenizer.from_file(str(tokenizer_file)), end_id)
