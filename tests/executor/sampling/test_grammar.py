"""Grammar matchers: allowed tokens, state after resumed outputs, and the end of a response."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.masks import Masks
from quintet.process.grammars import open_vocabulary
from quintet.wire.codec import pack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow
from quintet.wire.structured import StructuredOutputsParams

PROMPT = [9, 8, 7]
EOS, OTHER_END = 0, 3
MAX_DRAFTS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": -5, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
YES = LLMatcher.grammar_from_lark("start: /yes|yesterday|no/")


@cache
def model() -> ModelConfig:
    path = str(default_model_path())
    return ModelConfig(
        path=path,
        tokenizer_path=path,
        served_names=["m"],
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=4096,
        max_model_len=512,
        eos_token_ids=[EOS],
        kv=full_layers(1, 1, 8, 4, 16),
    )


@cache
def vocabulary() -> LLTokenizer:
    return open_vocabulary(model())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{default_model_path()}/tokenizer.json")


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(8, model(), lambda _: vocabulary(), max_drafts=MAX_DRAFTS)


def enter(grammars: Grammars, slot: int, grammar: str, outputs: list[int] | None = None, **more: Any) -> None:
    """Admit a request that already has these outputs."""
    row = NewRow(
        slot=slot,
        generation=1,
        request_id=slot,
        token_ids=pack_i32(PROMPT + (outputs or [])),
        num_prompt_tokens=len(PROMPT),
        params=SamplingParams(structured_outputs=StructuredOutputsParams(compiled=grammar), **more),
        seed=slot,
        stop_ids=[] if more.get("ignore_eos") else [EOS, *more.get("stop_token_ids", [])],
    )
    assert grammars.admit(row)


def allowed(masks: Masks, draw: int) -> list[int]:
    """Return the tokens that a draw of the step may give."""
    bits = np.unpackbits(masks.words[masks.rows[draw]].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def test_masks_use_the_threads_of_usable_cores(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have few of the machine's processors."""
    counts = []

    def executor(num_threads: int) -> LLExecutor:
        counts.append(num_threads)
        return LLExecutor(num_threads=num_threads)

    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("llguidance.LLExecutor", executor)
    enter(grammars, 0, YES)
    grammars.begin(np.array([0]), np.array([len(PROMPT)]), np.arange(1)).wait()
    assert counts == [1]


class Walk:
    """Requests in one batch that draw random allowed tokens."""

    def __init__(self, grammars: Grammars, outputs: dict[int, list[int]], seed: int = 0) -> None:
        self.grammars, self.outputs = grammars, outputs
        self.random = random.Random(seed)

    def step(self, slots: list[int]) -> list[list[int]]:
        """Run one step of these slots; return the allowed tokens of each."""
        positions = np.array([len(PROMPT) + len(self.outputs[slot]) for slot in slots])
        step = self.grammars.begin(np.array(slots), positions, np.arange(len(slots)))
        may = [allowed(step.wait(), draw) for draw in range(len(slots))]
        tokens = [self.random.choice(choices) for choices in may]
        step.note(tokens)
        for slot, token in zip(slots, tokens, strict=True):
            self.outputs[slot].append(token)
        return may

    def until_the_end(self, slot: int) -> Iterator[list[int]]:
        while self.outputs[slot][-1:] != [EOS]:
            yield self.step([slot])[0]


def text_of(outputs: list[int]) -> str:
    return tokenizer().decode(outputs, skip_special_tokens=True)


def test_random_draws_match_the_schema(grammars: Grammars) -> None:
    for seed in range(10):
        enter(grammars, 2, JSON)
        walk = Walk(grammars, {2: []}, seed)
        for may in walk.until_the_end(2):
            assert may
        answer = json.loads(text_of(walk.outputs[2]))
        assert set(answer) <= set(SCHEMA["properties"])  # type: ignore[arg-type]
        assert len(answer["name"]) <= 8 and -5 <= answer["size"] <= 99
        assert all(tag in "ab" for tag in answer.get("tags", []))


def test_a_preempted_request_resumes_its_matcher(grammars: Grammars) -> None:
    enter(grammars, 1, JSON)
    walk = Walk(grammars, {1: []}, seed=5)
    for may in walk.until_the_end(1):
        before = walk.outputs[1][:-1]
        enter(grammars, 6, JSON, before)
        assert Walk(grammars, {6: list(before)}).step([6]) == [may]


def test_a_recomputed_step_advances_once(grammars: Grammars) -> None:
    """For example when memory runs out during the step."""
    enter(grammars, 0, JSON)
    walk = Walk(grammars, {0: []})
    walk.step([0])
    here = len(PROMPT) + len(walk.outputs[0])
    first, again = (grammars.begin(np.array([0]), np.array([here]), np.array([0])) for _ in range(2))
    may = allowed(first.wait(), 0)
    first.note([may[0]])
    again.note([may[0]])
    walk.outputs[0].append(may[0])
    walk.step([0])


def test_a_response_may_end_only_when_complete(grammars: Grammars) -> None:
    """By the end token or the client's stop token; a response without a continuation ends."""
    ids = tokenizer().encode("yes", add_special_tokens=False).ids
    for outputs, ends in ((ids[:-1], False), (ids, True)):
        enter(grammars, 0, YES, outputs, stop_token_ids=[OTHER_END])
        may = Walk(grammars, {0: list(outputs)}).step([0])[0]
        assert ({EOS, OTHER_END} <= set(may)) == ends
        assert ends or not {EOS, OTHER_END} & set(may)
    ended = tokenizer().encode("no", add_special_tokens=False).ids
    enter(grammars, 0, YES, ended)
    assert Walk(grammars, {0: list(ended)}).step([0]) == [[EOS]]


def test_only_end_tokens_are_allowed_after_the_end(grammars: Grammars) -> None:
    """A step that was planned before the end was known, and a request that continues after the end."""
    ids = tokenizer().encode("yes", add_special_tokens=False).ids
    enter(grammars, 0, YES, ids, ignore_eos=True)
    assert EOS not in Walk(grammars, {0: list(ids)}).step([0])[0]
    ids = tokenizer().encode("yesterday", add_special_tokens=False).ids
    enter(grammars, 0, YES, ids, ignore_eos=True)
    walk = Walk(grammars, {0: list(ids)})
    assert [walk.step([0]) for _ in range(3)] == [[[EOS]]] * 3


def test_slots_do_not_mix(grammars: Grammars) -> None:
    enter(grammars, 0, JSON)
    enter(grammars, 3, YES)
    walk = Walk(grammars, {0: [], 3: []})
    together = walk.step([3, 0])
    enter(grammars, 0, JSON)
    enter(grammars, 3, YES)
    walk = Walk(grammars, {0: [], 3: []})
    assert [walk.step([3])[0], walk.step([0])[0]] == together


def test_a_request_without_grammar_reuses_a_slot(grammars: Grammars) -> None:
    enter(grammars, 0, JSON)
    plain = NewRow(0, 2, 9, pack_i32(PROMPT), len(PROMPT), SamplingParams(), 0)
    assert not grammars.admit(plain)


def test_a_failed_matcher_does_not_affect_other_requests(grammars: Grammars) -> None:
    """For example a grammar beyond its limits; here the outputs are invalid. The only allowed token is an end token."""
    wrong = tokenizer().encode("maybe", add_special_tokens=False).ids
    enter(grammars, 0, YES, wrong)
    enter(grammars, 5, YES)
    positions = np.array([len(PROMPT), len(PROMPT) + len(wrong)])
    step = grammars.begin(np.array([5, 0]), positions, np.array([0, 1]))
    assert allowed(step.wait(), 1) == [EOS]
    assert step.failed(np.array([3, 7])) == pack_i32([7])
    assert EOS not in allowed(step.wait(), 0)


def drafted_step(grammars: Grammars, slot: int, outputs: list[int], drafts: list[int]) -> StepMasks:
    """Begin the step of a row that verifies these drafts."""
    num_tokens, num_draws = len(PROMPT) + len(outputs), 1 + len(drafts)
    token_ids = np.zeros((8, num_tokens + num_draws), np.int32)
    token_ids[slot, num_tokens : num_tokens + len(drafts)] = drafts
    draws = np.arange(num_draws)
    return grammars.begin(np.full(num_draws, slot), num_tokens + draws, draws, token_ids)


def walk_with_drafts(grammars: Grammars, grammar: str, seed: int) -> tuple[list[int], bool]:
    """Draw the first or the last allowed token of each position, with random drafts of them; return the outputs, and
    whether the request failed."""
    rng, outputs = random.Random(seed), list[int]()
    enter(grammars, 2, grammar)
    while True:
        forced = grammars.forced(2) if rng.random() < 0.5 else None
        drafts = list(forced or [rng.randrange(1, 4096) for _ in range(rng.randrange(MAX_DRAFTS + 1))])[
            :MAX_DRAFTS
        ]
        step = drafted_step(grammars, 2, outputs, drafts)
        masks = step.wait()
        may = [allowed(masks, draw) if masks.rows[draw] >= 0 else [] for draw in range(1 + len(drafts))]
        if rng.random() < 0.6 and not forced:  # a second try, with drafts that the first one makes likely
            token = chosen_of(may[0], len(outputs))
            drafts = [token, *drafts[1:]]
            step = drafted_step(grammars, 2, outputs, drafts)
            masks = step.wait()
            may = [allowed(masks, draw) if masks.rows[draw] >= 0 else [] for draw in range(1 + len(drafts))]
        tokens = [chosen_of(choices, len(outputs) + draw) for draw, choices in enumerate(may)]
        step.note(tokens)
        for token, draft in zip(tokens, [*drafts, None], strict=True):
            outputs.append(token)
            if token == EOS:
                return outputs, bool(step.failed(np.zeros(len(tokens), np.int64)))
            if token != draft:
                break


def run_without_drafts(grammars: Grammars, grammar: str) -> tuple[list[int], bool]:
    outputs = list[int]()
    enter(grammars, 5, grammar)
    while outputs[-1:] != [EOS]:
        step = drafted_step(grammars, 5, outputs, [])
        token = chosen_of(allowed(step.wait(), 0), len(outputs))
        step.note([token])
        outputs.append(token)
    return outputs, bool(step.failed(np.zeros(1, np.int64)))


def chosen_of(choices: list[int], index: int) -> int:
    """Return a token that depends on the choices and the position only; -1 without choices."""
    if not choices:
        return -1
    return choices[(37 * index) % len(choices)] if index < 60 else choices[0]


@pytest.mark.parametrize("grammar", [JSON, YES])
def test_masks_along_drafts_are_those_without(grammars: Grammars, grammar: str) -> None:
    """Also after rejected drafts."""
    wanted = run_without_drafts(grammars, grammar)
    for seed in range(10):
        assert walk_with_drafts(grammars, grammar, seed) == wanted
    assert not wanted[1]


@pytest.mark.parametrize("most", [40, 80, 120, 200])
def test_grammar_exceeds_its_limits_at_the_same_token_with_drafts(
    grammars: Grammars, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected drafts and other requests of the same grammar do not count."""
    limits = LLParserLimits(max_lexer_states=most, verbose_errors=False)
    monkeypatch.setattr("quintet.process.grammars.bounds", lambda: limits)
    wanted = run_without_drafts(grammars, JSON)
    for seed in range(5):
        assert walk_with_drafts(grammars, JSON, seed) == wanted
    assert most > 40 or wanted[1]


def test_forced_tokens_and_allowed_drafts(grammars: Grammars) -> None:
    ids = tokenizer().encode('{"name":"', add_special_tokens=False).ids
    enter(grammars, 0, JSON)
    assert grammars.forced(0) == [] and grammars.num_allowed(0, ids) == 0  # no matcher yet
    drafted_step(grammars, 0, [], []).wait()
    forced = grammars.forced(0)
    assert forced and forced == ids[: len(forced)]
    assert grammars.num_allowed(0, ids) == len(ids)
    assert grammars.num_allowed(0, [*ids[:2], ids[0], ids[1]]) == 2
    assert grammars.forced(1) is None


def test_no_end_token_is_a_draft(grammars: Grammars) -> None:
    ids = tokenizer().encode("no", add_special_tokens=False).ids
    enter(grammars, 0, YES)
    drafted_step(grammars, 0, [], []).wait()
    assert grammars.num_allowed(0, [*ids, EOS]) == len(ids)
    enter(grammars, 0, YES, ids)
    drafted_step(grammars, 0, ids, []).wait()
    assert grammars.forced(0) == []
