"""Chats that draft heads learn from: prompts, and the file of answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bench.embedded.chats import Chat, load, prompts, save


def test_prompts_depend_on_the_seed_alone() -> None:
    assert prompts(3) == prompts(3) != prompts(4)


def test_prompts_differ() -> None:
    texts = [prompt.text for prompt in prompts(3)]
    assert len(set(texts)) == len(texts) > 5000


def test_a_held_out_topic_is_in_no_other_prompt() -> None:
    about_honey = [prompt for prompt in prompts(3) if "honey" in prompt.text]
    assert about_honey
    assert all(prompt.is_held_out for prompt in about_honey)


def test_saved_chats_are_loaded(tmp_path: Path) -> None:
    chats = [
        Chat(np.arange(5, dtype=np.int32), 2, is_held_out=True, is_greedy=False),
        Chat(np.arange(9, dtype=np.int32), 4, is_held_out=False, is_greedy=True),
    ]
    save(tmp_path / "answers.npz", chats)
    loaded = load(tmp_path / "answers.npz")
    assert [(chat.token_ids.tolist(), chat.num_prompt) for chat in loaded] == [
        ([0, 1, 2, 3, 4], 2),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], 4),
    ]
    assert [(chat.is_held_out, chat.is_greedy) for chat in loaded] == [(True, False), (False, True)]
