"""Frame size limits: messages of all processes fit."""

from pathlib import Path

import msgspec
import pytest

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.limits import LEAST_BYTES, MOST_BYTES, largest_frame
from quintet.wire.params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, SamplingParams
from quintet.wire.request import Echo, RequestSpec

from .test_record import config_of

LENGTH, SLOTS, VOCAB = 1 << 14, 128, 1 << 15


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    made = config_of(tmp_path)
    return msgspec.structs.replace(
        made,
        model=msgspec.structs.replace(made.model, vocab_size=VOCAB, max_model_len=LENGTH),
        scheduler=msgspec.structs.replace(made.scheduler, max_num_seqs=SLOTS, max_num_batched_tokens=2048),
    )


def test_prompt_as_long_as_a_body_reaches_the_tokenizer(config: EngineConfig) -> None:
    num_ids = config.frontend.max_body_bytes // 2  # `1,` each
    submit = m.Submit(1, m.TokenPrompt(bytes(4 * num_ids)), RequestSpec(SamplingParams(), 0, 0), 0, 0)
    assert LEAST_BYTES < len(encode(submit)) <= largest_frame(Role.TOKENIZER, config)


def test_body_with_one_token_a_byte_returns_to_the_frontend(config: EngineConfig) -> None:
    num_bytes = 1 << 20
    answer = m.Tokenized(1 << 62, bytes(4 * num_bytes), ["<0xFF>"] * num_bytes)
    growth = len(encode(answer)) / num_bytes
    assert growth * config.frontend.max_body_bytes <= largest_frame(Role.FRONTEND, config)


def test_plan_with_all_slots_at_full_length_reaches_the_executor(config: EngineConfig) -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), 1.5), allowed_token_ids=list(range(VOCAB)))
    row = s.NewRow(0, 1, 1 << 62, bytes(4 * LENGTH), 1, params, 1 << 63)
    plan = s.StepPlan(1, 0, b"", [row] * SLOTS, b"", b"", b"", b"", b"", b"")
    assert LEAST_BYTES < len(encode(plan)) <= largest_frame(Role.EXECUTOR, config)


def test_plan_with_bad_words_of_all_slots_reaches_the_executor(config: EngineConfig) -> None:
    """A word is encoded with and without a space before it, and a character of four bytes takes up to four tokens."""
    params = SamplingParams(bad_words=["\U0001f600" * MAX_BAD_WORD_CHARS] * MAX_BAD_WORDS)
    bad_word_ids = [[VOCAB - 1] * 4 * MAX_BAD_WORD_CHARS] * 2 * MAX_BAD_WORDS
    row = s.NewRow(0, 1, 1 << 62, bytes(4 * LENGTH), 1, params, 1 << 63, bad_word_ids=bad_word_ids)
    assert SLOTS * len(encode(row)) <= largest_frame(Role.EXECUTOR, config)


def test_logprobs_of_a_full_step_reach_core_and_detokenizer(config: EngineConfig) -> None:
    assert config.frontend.max_logprobs is not None
    width = 1 + config.frontend.max_logprobs
    entries = config.scheduler.max_num_batched_tokens
    entry = s.PromptLogprobs(
        0, 1, width, bytes(4 * entries), bytes(4 * entries * width), bytes(4 * entries * width)
    )
    result = s.StepResult(1, 0, b"", [], [entry])
    for role in (Role.CORE, Role.DETOKENIZER):
        assert len(encode(result)) <= largest_frame(role, config)


def test_openings_of_all_frontends_reach_a_new_detokenizer(config: EngineConfig) -> None:
    opened = m.Open(
        1 << 62, 9, 0, bytes(64), [], False, True, True, Echo.NONE, False, 0, 0, 0, bytes(4 * 500)
    )
    tokens = m.Tokens(1, 0, [opened] * config.frontend.max_queued_requests, b"", b"", b"", b"", b"", b"")
    assert len(encode(tokens)) <= largest_frame(Role.DETOKENIZER, config)


@pytest.mark.parametrize("role", list(Role))
def test_every_role_has_a_bound(role: Role, config: EngineConfig) -> None:
    assert LEAST_BYTES <= largest_frame(role, config) <= MOST_BYTES
