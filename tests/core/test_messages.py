"""Messages to detokenizers: openings, rows, log-probabilities, replay for a new detokenizer."""

from __future__ import annotations

from quintet.wire import codec
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.messages import Tokens
from quintet.wire.request import Echo, OutputParsing
from quintet.wire.step import PromptLogprobs, StepResult, TokenLogprobs
from tests.wire.respec import changed

from .fake import World
from .fake_model import expected

PROMPT = list(range(10, 31))


def messages_of(world: World, result: StepResult) -> list[tuple[int, Tokens]]:
    return world.engine.commit(result, world.tick()).tokens


def test_opening_carries_the_tail_of_the_prompt_or_all_of_it() -> None:
    world = World(max_steps_in_flight=1)
    world.admit(1, PROMPT)
    world.admit(2, PROMPT, echo=Echo.PLAIN)
    world.admit(3, PROMPT, return_prompt_ids=True)
    world.admit(4, PROMPT, [EmbedsSpan(10, "F16", 1, bytes(2 * 8), bytes(32))])
    world.plan()
    [(_, tokens)] = messages_of(world, world.executor.results.popleft())
    prompts = [list(codec.unpack_i32(opened.prompt_ids)) for opened in tokens.opens]
    assert prompts == [PROMPT[-16:], PROMPT, PROMPT, PROMPT[18:]]
    assert all(opened.scheduled_ns >= opened.arrival_ns for opened in tokens.opens)


def test_opening_says_if_prompt_logprobs_were_requested() -> None:
    world = World(max_steps_in_flight=1)
    world.admit(1, PROMPT)
    world.admit(2, PROMPT, prompt_logprobs=0)
    world.plan()
    [(_, tokens)] = messages_of(world, world.executor.results.popleft())
    assert [opened.prompt_logprobs for opened in tokens.opens] == [False, True]


def test_one_message_per_detokenizer_and_step() -> None:
    world = World(max_steps_in_flight=1, max_num_batched_tokens=256)
    for request_id in range(6):
        world.admit(request_id, PROMPT[request_id:], detokenizer=request_id % 2)
    world.plan()
    messages = messages_of(world, world.executor.results.popleft())
    rows = {index: list(codec.unpack_i64(tokens.request_ids)) for index, tokens in messages}
    assert len(messages) == 2 and rows == {0: [0, 2, 4], 1: [1, 3, 5]}


def test_opening_carries_output_parsing() -> None:
    world = World(max_steps_in_flight=1)
    parsing = OutputParsing("qwen3", "hermes", b"[]")
    world.admit(0, PROMPT, parsing=parsing)
    world.plan()
    ((_, tokens),) = messages_of(world, world.executor.results.popleft())
    assert [opened.parsing for opened in tokens.opens] == [parsing]


def test_newer_attempt_of_live_request_replays_outputs() -> None:
    world = World(max_steps_in_flight=1)
    for request_id in range(2):
        world.admit(request_id, PROMPT[request_id:], ignore_eos=True)
    for _ in range(3):
        world.step()
    before = list(world.outcomes[0].tokens)
    message = changed(world.sent[0], attempt=1, detokenizer=1, output_ids=codec.pack_i32(before[:1]))
    (old, closing), (new, opening) = world.engine.admit(message, world.tick()).tokens
    assert (old, list(codec.unpack_i64(closing.closed)), closing.opens) == (0, [0], [])
    (opened,) = opening.opens
    assert (new, opened.request_id, opened.num_seen, opened.attempt) == (1, 0, 1, 1)
    assert list(codec.unpack_i32(opened.output_ids)) == before and len(before) == 3
    assert world.engine.admit(message, world.tick()).tokens == []  # a repeated attempt counts once
    world.run()
    assert world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 16  # nothing is computed twice


def test_newer_attempt_without_messages_replays_from_start() -> None:
    """Includes the outputs of the resumed request that no detokenizer has."""
    world = World(max_steps_in_flight=1)
    world.admit(0, PROMPT, output_ids=[5, 6], replays=True, ignore_eos=True)
    world.step()
    message = changed(world.sent[0], attempt=1, detokenizer=1)
    (_, (_, opening)) = world.engine.admit(message, world.tick()).tokens
    (opened,) = opening.opens
    assert list(codec.unpack_i32(opened.output_ids))[:2] == [5, 6] and opened.num_seen == 0


def test_lost_logprobs_are_recomputed() -> None:
    world = World(max_steps_in_flight=1)
    world.admit(0, PROMPT, ignore_eos=True, logprobs=2)
    for _ in range(3):
        world.step()
    world.resend(0, 1)
    world.run()
    assert world.outcomes[0].tokens == expected(PROMPT, 0, 8, stops=())
    assert world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 3 + 7


def test_checksum_is_for_audits_only() -> None:
    checksums = []
    for audit in (False, True):
        world = World(audit=audit)
        world.admit(1, PROMPT)
        plan = world.plan()
        assert plan is not None
        checksums.append(plan.checksum)
    assert checksums[0] == 0 != checksums[1]


def logprobs_of(row: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(row, 1, codec.pack_i32([token]), codec.pack_f32([-1.0]))


def test_logprobs_name_rows_of_the_message() -> None:
    world = World(max_steps_in_flight=1, max_num_batched_tokens=256)
    for request_id in range(4):
        world.admit(request_id, PROMPT[request_id:], detokenizer=request_id % 2, ignore_eos=True, logprobs=0)
    world.plan()
    result = world.executor.results.popleft()
    result.logprobs = [logprobs_of(row, 50 + row) for row in range(4)]
    world.engine.stop_hit([0], [0], world.tick())
    messages = dict(messages_of(world, result))
    rows = {
        index: [(entry.row, codec.unpack_i32(entry.token_ids)[0]) for entry in tokens.logprobs]
        for index, tokens in messages.items()
    }
    assert rows == {0: [(0, 52)], 1: [(0, 51), (1, 53)]}


def prompt_logprobs_of(row: int, first: int, last: int) -> PromptLogprobs:
    positions = range(first, last)
    ids = [token for position in positions for token in (position, 0)]
    return PromptLogprobs(
        row, first, 2, codec.pack_i32(positions), codec.pack_i32(ids), codec.pack_f32([0.0] * len(ids))
    )


def test_prompt_logprobs_are_chunked_and_sent_once() -> None:
    world = World(max_steps_in_flight=1, max_num_batched_tokens=8)
    world.admit(1, PROMPT, prompt_logprobs=1)
    seen: list[int] = []
    first_rows = []

    def step(first: int, last: int) -> None:
        world.plan()
        result = world.executor.results.popleft()
        result.prompt_logprobs = [prompt_logprobs_of(0, first, last)]
        for _, tokens in messages_of(world, result):
            first_rows.append(tokens.num_tokens)
            for entry in tokens.prompt_logprobs:
                ranks = list(codec.unpack_i32(entry.ranks))
                assert ranks == list(range(entry.first, entry.first + len(ranks)))
                assert list(codec.unpack_i32(entry.token_ids))[::2] == ranks
                assert len(entry.logprobs) == 8 * len(ranks)
                seen.extend(ranks)

    step(1, 9)
    world.new_executor()  # the first chunk is computed again, with the next one
    world.engine.state.limits = replace_budget(world)  # type: ignore[union-attr]
    step(1, 13)
    step(13, 21)
    assert seen == list(range(1, 21))
    assert first_rows == [b"\0", b"\0", b"\1"]


def replace_budget(world: World) -> object:
    from dataclasses import replace

    assert world.engine.state is not None
    return replace(world.engine.state.limits, max_batched=12)
