"""What operators ask of KV memory: prefixes are listed as they are, pinned ones stay, evicted ones are gone."""

from __future__ import annotations

import random

import pytest

from quintet.core import recurrent_state
from quintet.core.kv_services import kv_admin
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.errors import ErrorCode
from quintet.wire.kv_admin import KvPrefix, KvQuery, KvReport, Verb
from quintet.wire.kv_spec import KvGroup
from tests.core.fake import World, expected
from tests.core.kv.fake_disk import FakeDisk
from tests.core.kv.test_groups import HYBRID, MIXED, SLIDING, STATES

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and one more."""
OTHER = [*PROMPT[:8], *range(100, 113)]
"""Begins alike, for two blocks."""
FULL = [KvGroup("full", [0])]


def state_of(world: World) -> SchedulerState:
    assert world.engine.state is not None
    return world.engine.state


def serve(world: World, request_id: int, prompt: list[int], **options: object) -> int | None:
    """Run a request for one token to its end; return how many of its tokens were cached."""
    world.admit(request_id, prompt, max_tokens=1, ignore_eos=True, **options)
    world.run()
    assert world.outcomes[request_id].tokens == expected(prompt, request_id, 1, stops=())
    return world.outcomes[request_id].num_cached


def ask(world: World, verb: Verb, prompt: list[int] | None = None, **fields: object) -> KvReport:
    tokens = b"" if prompt is None else pack_i32(prompt)
    query = KvQuery(1, 0, verb, token_ids=tokens, **({"limit": 10} | fields))  # type: ignore[arg-type]
    desk = world.engine.kv_admin
    report = desk.answer(world.engine.state, query, 0, world.tick())
    while report is None:  # until the disk has answered
        world.plan()
        assert world.commit(), "nobody answers"
        report = next((told for _, told in desk.files.take_done()), None)
    world.engine.drop((), world.now)  # audits
    return report


def done(report: KvReport) -> list[KvPrefix]:
    assert report.error is None, report.error
    return report.prefixes


def crowd(world: World, first_id: int) -> None:
    """Have others take all blocks that may be taken."""
    rng = random.Random(first_id)
    for request_id in range(first_id, first_id + 24):
        serve(world, request_id, [rng.randrange(3, 200) for _ in range(30)])


def test_prefixes_are_listed_by_what_nothing_follows() -> None:
    world = World()
    serve(world, 1, PROMPT)
    serve(world, 2, OTHER, cache_salt="")
    serve(world, 3, PROMPT, cache_salt="mine")
    report = ask(world, "list", with_tokens=True)
    salted, other, first = done(report)
    assert [prefix.num_tokens for prefix in report.prefixes] == [20, 20, 20]
    assert list(unpack_i32(first.token_ids)) == list(unpack_i32(salted.token_ids)) == PROMPT[:20]
    assert list(unpack_i32(other.token_ids)) == OTHER[:20]
    assert (first.device, first.host, first.disk, first.is_pinned) == (5, 0, 0, False)
    assert 0 <= salted.idle_ns < other.idle_ns < first.idle_ns
    assert report.room is not None and report.room.num_known == 5 + 3 + 5
    serve(world, 4, PROMPT)
    assert [prefix.digest for prefix in done(ask(world, "list", limit=1))] == [first.digest], "used last"
    assert not done(ask(world, "list"))[0].token_ids, "not unless asked for"


@pytest.mark.parametrize("groups", [FULL, MIXED, SLIDING], ids=["full", "mixed", "sliding"])
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_pinned_prefix_stays(groups: list[KvGroup], comes_first: bool) -> None:
    """Also one that was pinned before anybody computed it."""
    world = World(groups=groups, num_blocks=70, max_model_len=40)
    if comes_first:
        serve(world, 1, PROMPT)
    (pinned,) = done(ask(world, "pin", PROMPT))
    assert pinned.is_pinned and pinned.num_tokens == 20
    if not comes_first:
        assert pinned.device == 0
        serve(world, 1, PROMPT)
    crowd(world, 10)
    assert serve(world, 5, PROMPT) == 20
    done(ask(world, "unpin", name=pinned.digest.hex()))
    crowd(world, 40)
    assert serve(world, 3, PROMPT) == 0
    world.assert_idle()


def test_states_are_pinned_where_they_are_kept() -> None:
    world = World(groups=HYBRID, num_blocks=70, max_model_len=40)
    assert (refused := ask(world, "pin", PROMPT).error) is not None and refused.code is ErrorCode.NOT_FOUND
    serve(world, 1, PROMPT)
    (pinned,) = done(ask(world, "pin", PROMPT))
    crowd(world, 10)
    assert serve(world, 5, PROMPT) == pinned.num_tokens > 0


@pytest.mark.parametrize("lost", ["executor", "core"])
def test_a_pin_outlives_executor_and_core(lost: str) -> None:
    world = World(num_blocks=30, max_model_len=40)
    serve(world, 1, PROMPT)
    (pinned,) = done(ask(world, "pin", PROMPT))
    kept = world.engine.kv_admin.take_changes()
    assert kept is not None and world.engine.kv_admin.take_changes() is None, "told once"
    if lost == "core":
        world.engine = world._new_engine()
        world.engine.kv_admin.restore_pins(kept)
    world.new_executor()
    assert world.engine.kv_admin.take_changes() == kept, "the executor is new"
    (shown,) = done(ask(world, "list"))
    assert (shown.digest, shown.is_pinned, shown.device) == (pinned.digest, True, 0)
    assert serve(world, 5, PROMPT) == 0, "what the executor lost is computed"
    crowd(world, 10)
    assert serve(world, 3, PROMPT) == 20, "and stays from then on"


def test_pins_leave_room_for_a_request_of_full_length() -> None:
    world = World(num_blocks=16, max_model_len=40)  # ten blocks, so that six may be pinned
    done(ask(world, "pin", PROMPT))
    report = ask(world, "pin", list(range(50, 60)))
    assert report.error is not None and report.error.code is ErrorCode.INVALID
    assert "needs 2 blocks, and 5 are pinned; of 16 blocks at most 6 may be pinned" in report.error.message
    done(ask(world, "pin", [*PROMPT[:20], 1, 2, 3, 4]))  # shares all but one
    serve(world, 1, PROMPT)
    assert serve(world, 2, list(range(100, 138))) == 0, "of full length"
    world.new_executor(num_blocks=11)
    assert not world.engine.kv_admin.pins.wanted, "there is room for none beside such a request"


def test_an_evicted_prefix_is_gone_and_what_others_begin_with_is_not() -> None:
    world = World()
    serve(world, 1, PROMPT)
    serve(world, 2, OTHER)
    (gone,) = done(ask(world, "evict", PROMPT))
    assert gone.device == 5, "as it was"
    assert serve(world, 3, OTHER) == 20
    assert serve(world, 4, PROMPT) == 8
    done(ask(world, "evict", PROMPT[:4]))
    assert serve(world, 5, OTHER) == 0, "all that begins so"
    world.assert_idle()


def test_what_runs_goes_on_when_its_prefix_is_evicted() -> None:
    world = World()
    world.admit(1, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.step()
    done(ask(world, "evict", PROMPT))
    world.run()
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 20, stops=())
    assert serve(world, 5, PROMPT) == 0
    world.assert_idle()


@pytest.mark.parametrize("groups", [HYBRID, STATES, MIXED], ids=["hybrid", "states", "mixed"])
def test_states_and_windows_are_evicted_with_the_ends_behind_them(groups: list[KvGroup]) -> None:
    world = World(groups=groups, num_blocks=100)
    serve(world, 1, PROMPT)
    assert serve(world, 2, [*PROMPT, 40, 41, 42]) != 0
    done(ask(world, "evict", PROMPT[:4]))
    assert serve(world, 3, [*PROMPT, 40, 41, 42]) == 0


def test_evicted_on_disk_too() -> None:
    disk = FakeDisk(20)
    world = World(disk=disk)
    serve(world, 1, PROMPT)
    (there,) = done(ask(world, "list"))
    assert (there.device, there.disk) == (5, 5)
    done(ask(world, "evict", PROMPT))
    world.plan()
    assert not disk.contents
    world.new_executor()
    assert serve(world, 5, PROMPT) == 0


def test_pinned_contents_stay_on_disk() -> None:
    world = World(disk=FakeDisk(16), num_blocks=70, max_model_len=40)
    serve(world, 1, PROMPT)
    done(ask(world, "pin", PROMPT))
    crowd(world, 10)
    crowd(world, 40)
    world.new_executor()
    assert serve(world, 5, PROMPT) == 20, "read from there"


@pytest.mark.parametrize(
    ("verb", "fields", "code", "words"),
    [
        ("evict", {"name": "abc"}, ErrorCode.INVALID, "too short"),
        ("evict", {"name": "0" * 8}, ErrorCode.NOT_FOUND, "No prefix has a name that begins with 00000000"),
        ("unpin", {"name": "0" * 8}, ErrorCode.NOT_FOUND, "No pinned prefix"),
        ("unpin", {"prompt": PROMPT}, ErrorCode.NOT_FOUND, "is not pinned"),
        ("pin", {"prompt": [5, 6, 7]}, ErrorCode.INVALID, "has 3 tokens; only full blocks of 4 are cached"),
    ],
)
def test_what_cannot_be_is_refused(
    verb: Verb, fields: dict[str, object], code: ErrorCode, words: str
) -> None:
    report = ask(World(), verb, **fields)  # type: ignore[arg-type]
    assert report.error is not None and report.error.code is code and words in report.error.message


def test_what_is_pinned_is_not_evicted() -> None:
    world = World(max_model_len=40)
    serve(world, 1, PROMPT)
    done(ask(world, "pin", PROMPT))
    refused = ask(world, "evict", PROMPT[:4]).error
    assert refused is not None and "is pinned; unpin it first" in refused.message


@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("groups", [FULL, MIXED, HYBRID, SLIDING], ids=["full", "mixed", "hybrid", "sliding"])
@pytest.mark.parametrize("seed", range(12))
def test_random_wishes_among_random_requests(
    seed: int, groups: list[KvGroup], with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor looks on after each, and every answer is what it would be without them."""
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 1 + seed % 9)
    rng = random.Random(seed)
    disk = FakeDisk(30) if with_disk else None
    world = World(groups=groups, num_blocks=60, max_model_len=48, max_steps_in_flight=1 + seed % 3, disk=disk)
    stems = [[rng.randrange(3, 200) for _ in range(30)] for _ in range(3)]
    verbs: list[Verb] = ["pin", "unpin", "evict", "list"]
    sent: dict[int, list[int]] = {}
    for request_id in range(1, 40):
        stem = rng.choice(stems)
        sent[request_id] = [*stem[: rng.randint(1, 30)], rng.randrange(3, 200)]
        world.admit(request_id, sent[request_id], max_tokens=8, ignore_eos=True)
        for _ in range(rng.randint(0, 4)):
            world.step()
        ask(world, rng.choice(verbs), stem[: rng.randint(1, 30)], with_tokens=True)
        if rng.random() < 0.05:
            world.new_executor()
    world.run()
    for request_id, prompt in sent.items():
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 8, stops=())


def test_what_is_remembered_is_no_more_than_what_is_held() -> None:
    world = World(num_blocks=20, max_model_len=40)
    rng = random.Random(1)
    for request_id in range(1, 300):
        serve(world, request_id, [*PROMPT[: rng.randint(1, 20)], *rng.choices(range(3, 200), k=8)])
        assert len(world.engine.kv_admin.prefix_paths) <= 2 * 20 + 2
    assert len(done(ask(world, "list"))) > 1


@pytest.mark.parametrize("groups", [FULL, MIXED, HYBRID], ids=["full", "mixed", "hybrid"])
def test_a_prefix_goes_to_another_server(groups: list[KvGroup]) -> None:
    here, there = FakeDisk(40), FakeDisk(40)
    world = World(disk=here, groups=groups)
    serve(world, 1, PROMPT)
    (prefix, *_) = done(ask(world, "list"))
    report = ask(world, "export", name=prefix.digest.hex(), file="a.kv")
    assert [each.digest for each in done(report)] == [prefix.digest] and report.num_bytes > 0
    other = World(disk=there, groups=groups)
    there.files = here.files
    there.past = here.past
    brought = ask(other, "import", file="a.kv")
    assert brought.error is None and (brought.num_imported, brought.num_known) == (report.num_bytes, 0)
    assert serve(other, 2, PROMPT) == prefix.num_tokens
    again = ask(other, "import", file="a.kv")
    assert (again.num_imported, again.num_known) == (0, report.num_bytes)


def test_files_that_cannot_be_are_refused() -> None:
    disk = FakeDisk(40)
    world = World(disk=disk)
    for verb, fields, words in (
        ("export", {"prompt": PROMPT, "file": "a.kv"}, "Only 0 of the prefix's 5 blocks are on disk"),
        ("import", {"file": "a.kv"}, "There is no file a.kv."),
    ):
        refused = ask(world, verb, **fields).error  # type: ignore[arg-type]
        assert refused is not None and words in refused.message
    refused = ask(World(), "import", file="a.kv").error
    assert refused is not None and "start the server with --kv-disk" in refused.message


def test_an_executor_that_goes_takes_its_tasks_along() -> None:
    world = World(disk=FakeDisk(40))
    query = KvQuery(1, 0, "import", file="a.kv")
    desk = world.engine.kv_admin
    assert desk.answer(world.engine.state, query, 0, world.tick()) is None and not desk.files.take_done()
    world.new_executor()
    ((_, report),) = desk.files.take_done()
    assert report.error is not None and report.error.code is ErrorCode.UNAVAILABLE


def test_a_question_is_answered_some_blocks_a_turn_while_there_are_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of hundreds of thousands of blocks a listing takes the core seconds: no step waits for that."""
    monkeypatch.setattr(kv_admin, "BLOCKS_PER_ITERATION", 6)
    world = World(num_blocks=200)
    for request_id in range(1, 9):
        serve(world, request_id, [request_id, *PROMPT])
    world.admit(50, OTHER, max_tokens=60, ignore_eos=True)
    world.plan()
    world.commit()
    desk = world.engine.kv_admin
    desk.take(KvQuery(1, 0, "list", limit=10, with_tokens=True), 0)
    desk.take(KvQuery(2, 0, "list", limit=10), 0)
    told: list[KvReport] = []
    turns = 0
    while len(told) < 2:
        desk.advance(world.engine.state, world.tick())
        told += [report for _, report in desk.files.take_done()]
        turns += 1
        assert turns < 60 and state_of(world).live
        world.plan()
        world.commit()
    assert turns >= 8, "two trails a turn, for each of the two"
    assert told[0].num_prefixes == told[1].num_prefixes == 9
    for prefix in told[0].prefixes:
        ids = list(unpack_i32(prefix.token_ids))
        assert len(ids) == prefix.num_tokens and ids[1:5] in (PROMPT[:4], OTHER[1:5])

    desk.take(KvQuery(3, 0, "list", limit=10), 0)
    world.run()
    desk.advance(world.engine.state, world.tick())
    assert len(desk.files.take_done()) == 1, "nobody waits for a step: at once"


def test_what_is_remembered_of_a_prompt_is_what_is_held_of_it() -> None:
    world = World(num_blocks=20)
    for request_id in range(1, 40):
        serve(world, request_id, [request_id, *PROMPT])
    for trail in world.engine.kv_admin.prefix_paths._paths:
        assert trail.tokens is not None
        assert len(trail.tokens) <= max(len(trail.digests) * 4, 24)
