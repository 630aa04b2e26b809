"""KV administration: list, pin, evict, export and import of prefixes."""

from __future__ import annotations

import random

import pytest

from quintet.core import recurrent_state
from quintet.core.kv import prefix_paths
from quintet.core.kv.prefix import extend_chain, salt_digest
from quintet.core.kv_services import kv_admin
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.errors import ErrorCode
from quintet.wire.kv_admin import KvPrefix, KvQuery, KvReport, Verb
from quintet.wire.kv_spec import KvGroup
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.kv.fake_back_ends import FakeDisk
from tests.core.kv.test_groups import HYBRID, MIXED, SLIDING, STATES

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and one more."""
OTHER = [*PROMPT[:8], *range(100, 113)]
"""Shares its first two blocks with PROMPT."""
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


def query_core(world: World, verb: Verb, prompt: list[int] | None = None, **fields: object) -> KvReport:
    tokens = b"" if prompt is None else pack_i32(prompt)
    query = KvQuery(1, 0, verb, token_ids=tokens, **({"limit": 10} | fields))  # type: ignore[arg-type]
    admin = world.engine.kv_admin
    report = admin.answer(world.engine.state, query, 0, world.tick())
    while report is None:  # until the disk tier has answered
        world.plan()
        assert world.commit(), "query has no answer"
        report = next((reports for _, reports in admin.files.take_done()), None)
    world.engine.drop((), world.now)  # audits
    return report


def done(report: KvReport) -> list[KvPrefix]:
    assert report.error is None, report.error
    return report.prefixes


def crowd(world: World, first_id: int) -> None:
    """Fill all free and evictable blocks with other requests."""
    rng = random.Random(first_id)
    for request_id in range(first_id, first_id + 24):
        serve(world, request_id, [rng.randrange(3, 200) for _ in range(30)])


def test_prefixes_are_listed_by_their_longest_extension() -> None:
    world = World()
    serve(world, 1, PROMPT)
    serve(world, 2, OTHER, cache_salt="")
    serve(world, 3, PROMPT, cache_salt="mine")
    report = query_core(world, "list", with_tokens=True)
    salted, other, first = done(report)
    assert [prefix.num_tokens for prefix in report.prefixes] == [20, 20, 20]
    assert list(unpack_i32(first.token_ids)) == list(unpack_i32(salted.token_ids)) == PROMPT[:20]
    assert list(unpack_i32(other.token_ids)) == OTHER[:20]
    assert (first.device, first.host, first.disk, first.is_pinned) == (5, 0, 0, False)
    assert 0 <= salted.idle_ns < other.idle_ns < first.idle_ns
    assert report.usage is not None and report.usage.num_known == 5 + 3 + 5
    serve(world, 4, PROMPT)
    assert [prefix.digest for prefix in done(query_core(world, "list", limit=1))] == [first.digest], (
        "most recently used first"
    )
    assert not done(query_core(world, "list"))[0].token_ids, "token ids are optional"


@pytest.mark.parametrize("groups", [FULL, MIXED, SLIDING], ids=["full", "mixed", "sliding"])
@pytest.mark.parametrize("comes_first", [True, False])
def test_pinned_prefix_is_not_evicted(groups: list[KvGroup], comes_first: bool) -> None:
    """Also when it is pinned before it is computed."""
    world = World(groups=groups, num_blocks=70, max_model_len=40)
    if comes_first:
        serve(world, 1, PROMPT)
    (pinned,) = done(query_core(world, "pin", PROMPT))
    assert pinned.is_pinned and pinned.num_tokens == 20
    if not comes_first:
        assert pinned.device == 0
        serve(world, 1, PROMPT)
    crowd(world, 10)
    assert serve(world, 5, PROMPT) == 20
    done(query_core(world, "unpin", name=pinned.digest.hex()))
    crowd(world, 40)
    assert serve(world, 3, PROMPT) == 0
    world.assert_idle()


def test_states_are_pinned_where_they_are_kept() -> None:
    world = World(groups=HYBRID, num_blocks=70, max_model_len=40)
    assert (
        refused := query_core(world, "pin", PROMPT).error
    ) is not None and refused.code is ErrorCode.NOT_FOUND
    serve(world, 1, PROMPT)
    (pinned,) = done(query_core(world, "pin", PROMPT))
    crowd(world, 10)
    assert serve(world, 5, PROMPT) == pinned.num_tokens > 0


@pytest.mark.parametrize("lost", ["executor", "core"])
def test_pin_survives_executor_and_core(lost: str) -> None:
    world = World(num_blocks=30, max_model_len=40)
    serve(world, 1, PROMPT)
    (pinned,) = done(query_core(world, "pin", PROMPT))
    kept = world.engine.kv_admin.take_changes()
    assert not world.engine.kv_admin.has_changes, "pins are reported once"
    if lost == "core":
        world.engine = world._new_engine()
        world.engine.kv_admin.restore_pins(kept)
    world.new_executor()
    assert world.engine.kv_admin.take_changes() == kept, "pins are reported to the new executor"
    (shown,) = done(query_core(world, "list"))
    assert (shown.digest, shown.is_pinned, shown.device) == (pinned.digest, True, 0)
    assert serve(world, 5, PROMPT) == 0, "lost blocks are recomputed"
    crowd(world, 10)
    assert serve(world, 3, PROMPT) == 20, "pinned blocks are cached from then on"


def test_pins_leave_blocks_for_a_request_of_full_length() -> None:
    world = World(num_blocks=16, max_model_len=40)  # ten blocks, so that six may be pinned
    done(query_core(world, "pin", PROMPT))
    report = query_core(world, "pin", list(range(50, 60)))
    assert report.error is not None and report.error.code is ErrorCode.INVALID
    assert "needs 2 blocks, and 5 are pinned; of 16 blocks at most 6 may be pinned" in report.error.message
    done(query_core(world, "pin", [*PROMPT[:20], 1, 2, 3, 4]))  # shares all but one
    serve(world, 1, PROMPT)
    assert serve(world, 2, list(range(100, 138))) == 0, "request of full length finds no cached tokens"
    world.new_executor(num_blocks=11)
    assert not world.engine.kv_admin.pins.wanted, "no block can be pinned next to such a request"


def test_evicting_a_prefix_keeps_shared_blocks() -> None:
    world = World()
    serve(world, 1, PROMPT)
    serve(world, 2, OTHER)
    (gone,) = done(query_core(world, "evict", PROMPT))
    assert gone.device == 5, "device blocks are unchanged"
    assert serve(world, 3, OTHER) == 20
    assert serve(world, 4, PROMPT) == 8
    done(query_core(world, "evict", PROMPT[:4]))
    assert serve(world, 5, OTHER) == 0, "all extensions are evicted"
    world.assert_idle()


def test_running_request_continues_when_its_prefix_is_evicted() -> None:
    world = World()
    world.admit(1, PROMPT, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        world.step()
    done(query_core(world, "evict", PROMPT))
    world.run()
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 20, stops=())
    assert serve(world, 5, PROMPT) == 0
    world.assert_idle()


@pytest.mark.parametrize("groups", [HYBRID, STATES, MIXED], ids=["hybrid", "states", "mixed"])
def test_states_and_windows_are_evicted_with_later_blocks(groups: list[KvGroup]) -> None:
    world = World(groups=groups, num_blocks=100)
    serve(world, 1, PROMPT)
    assert serve(world, 2, [*PROMPT, 40, 41, 42]) != 0
    done(query_core(world, "evict", PROMPT[:4]))
    assert serve(world, 3, [*PROMPT, 40, 41, 42]) == 0


def test_eviction_includes_disk() -> None:
    disk = FakeDisk(20)
    world = World(disk=disk)
    serve(world, 1, PROMPT)
    (listed,) = done(query_core(world, "list"))
    assert (listed.device, listed.disk) == (5, 5)
    done(query_core(world, "evict", PROMPT))
    world.plan()
    assert not disk.contents
    world.new_executor()
    assert serve(world, 5, PROMPT) == 0


def test_pinned_blocks_stay_on_disk() -> None:
    world = World(disk=FakeDisk(16), num_blocks=70, max_model_len=40)
    serve(world, 1, PROMPT)
    done(query_core(world, "pin", PROMPT))
    crowd(world, 10)
    crowd(world, 40)
    world.new_executor()
    assert serve(world, 5, PROMPT) == 20, "blocks are read from disk"


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
def test_invalid_query_is_rejected(
    verb: Verb, fields: dict[str, object], code: ErrorCode, words: str
) -> None:
    report = query_core(World(), verb, **fields)  # type: ignore[arg-type]
    assert report.error is not None and report.error.code is code and words in report.error.message


def test_pinned_prefix_is_not_evicted_by_query() -> None:
    world = World(max_model_len=40)
    serve(world, 1, PROMPT)
    done(query_core(world, "pin", PROMPT))
    refused = query_core(world, "evict", PROMPT[:4]).error
    assert refused is not None and "is pinned; unpin it first" in refused.message


@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("groups", [FULL, MIXED, HYBRID, SLIDING], ids=["full", "mixed", "hybrid", "sliding"])
@pytest.mark.parametrize("seed", range(12))
def test_random_queries_during_random_requests(
    seed: int, groups: list[KvGroup], with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auditor checks after each query; answers are the same as without queries."""
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 1 + seed % 9)
    monkeypatch.setattr(prefix_paths, "PART_BLOCKS", 1 + seed % 4)
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
        query_core(world, rng.choice(verbs), stem[: rng.randint(1, 30)], with_tokens=True)
        if rng.random() < 0.05:
            world.new_executor()
    world.run()
    for request_id, prompt in sent.items():
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 8, stops=())


def test_remembered_prefixes_are_bounded_by_held_blocks() -> None:
    world = World(num_blocks=20, max_model_len=40)
    rng = random.Random(1)
    for request_id in range(1, 300):
        serve(world, request_id, [*PROMPT[: rng.randint(1, 20)], *rng.choices(range(3, 200), k=8)])
        assert len(world.engine.kv_admin.prefix_paths) <= 2 * 20 + 2
    assert len(done(query_core(world, "list"))) > 1


@pytest.mark.parametrize("groups", [FULL, MIXED, HYBRID], ids=["full", "mixed", "hybrid"])
def test_prefix_is_exported_to_another_server(groups: list[KvGroup]) -> None:
    source, target = FakeDisk(40), FakeDisk(40)
    world = World(disk=source, groups=groups)
    serve(world, 1, PROMPT)
    (prefix, *_) = done(query_core(world, "list"))
    report = query_core(world, "export", name=prefix.digest.hex(), file="a.kv")
    assert [each.digest for each in done(report)] == [prefix.digest] and report.num_bytes > 0
    other = World(disk=target, groups=groups)
    target.files = source.files
    target.past = source.past
    imported = query_core(other, "import", file="a.kv")
    assert imported.error is None and (imported.num_imported, imported.num_known) == (report.num_bytes, 0)
    assert serve(other, 2, PROMPT) == prefix.num_tokens
    again = query_core(other, "import", file="a.kv")
    assert (again.num_imported, again.num_known) == (0, report.num_bytes)


def test_invalid_files_are_rejected() -> None:
    disk = FakeDisk(40)
    world = World(disk=disk)
    for verb, fields, words in (
        ("export", {"prompt": PROMPT, "file": "a.kv"}, "Only 0 of the prefix's 5 blocks are on disk"),
        ("import", {"file": "a.kv"}, "There is no file a.kv."),
    ):
        refused = query_core(world, verb, **fields).error  # type: ignore[arg-type]
        assert refused is not None and words in refused.message
    refused = query_core(World(), "import", file="a.kv").error
    assert refused is not None and "start the server with --kv-disk" in refused.message


def test_tasks_of_lost_executor_fail() -> None:
    world = World(disk=FakeDisk(40))
    query = KvQuery(1, 0, "import", file="a.kv")
    admin = world.engine.kv_admin
    assert admin.answer(world.engine.state, query, 0, world.tick()) is None and not admin.files.take_done()
    world.new_executor()
    ((_, report),) = admin.files.take_done()
    assert report.error is not None and report.error.code is ErrorCode.UNAVAILABLE


def test_query_is_answered_in_batches_while_requests_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listing hundreds of thousands of blocks takes seconds; no step waits for it."""
    monkeypatch.setattr(kv_admin, "BLOCKS_PER_ITERATION", 6)
    world = World(num_blocks=200)
    for request_id in range(1, 9):
        serve(world, request_id, [request_id, *PROMPT])
    world.admit(50, OTHER, max_tokens=60, ignore_eos=True)
    world.plan()
    world.commit()
    admin = world.engine.kv_admin
    admin.take(KvQuery(1, 0, "list", limit=10, with_tokens=True), 0)
    admin.take(KvQuery(2, 0, "list", limit=10), 0)
    reports: list[KvReport] = []
    iterations = 0
    while len(reports) < 2:
        admin.advance(world.engine.state, world.tick())
        reports += [report for _, report in admin.files.take_done()]
        iterations += 1
        assert iterations < 60 and state_of(world).live
        world.plan()
        world.commit()
    assert iterations >= 8, "two paths an iteration, for each of the two queries"
    assert reports[0].num_prefixes == reports[1].num_prefixes == 9
    for prefix in reports[0].prefixes:
        ids = list(unpack_i32(prefix.token_ids))
        assert len(ids) == prefix.num_tokens and ids[1:5] in (PROMPT[:4], OTHER[1:5])

    admin.take(KvQuery(3, 0, "list", limit=10), 0)
    world.run()
    admin.advance(world.engine.state, world.tick())
    assert len(admin.files.take_done()) == 1, "idle core answers at once"


def test_remembered_tokens_are_bounded_by_held_blocks() -> None:
    world = World(num_blocks=20)
    for request_id in range(1, 40):
        serve(world, request_id, [request_id, *PROMPT])
    for path in world.engine.kv_admin.prefix_paths._paths:
        assert path.tokens is not None
        assert len(path.tokens) <= max(len(path.digests) * 4, 24)


def test_common_prefix_of_many_requests_is_kept_once() -> None:
    """Otherwise short requests with one long document take more memory than their blocks."""
    paths, num_requests = kv_admin.KvAdmin().prefix_paths, 40
    paths.block_size, paths.reach = 4, len
    document = list(range(3, 203)) * 4
    for request_id in range(num_requests):
        tokens, digests = [*document, request_id, 0, 0, 0], list[bytes]()
        extend_chain(digests, salt_digest(""), tokens, 4, 201)
        paths.add(digests, tokens)
    kept = {id(digest) for path in paths._paths for digest in path.digests}
    assert len(paths) == num_requests and len(kept) < 200 + num_requests * 33
    assert all(path.tokens is not None and list(path.tokens[:800]) == document for path in paths._paths)


@pytest.mark.parametrize("num_held", [1, 4, 7, 8])
def test_partly_evicted_path_keeps_its_cached_part(num_held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_paths, "PART_BLOCKS", 4)
    paths = kv_admin.KvAdmin().prefix_paths
    paths.block_size, paths.reach = 1, lambda digests: min(num_held, len(digests))
    digests = [bytes([number]) for number in range(10)]
    paths.add(digests, list(range(10)))
    (path,) = paths._paths
    assert path.digests == digests[:num_held] and list(path.tokens or ()) == list(range(num_held))
    for position in range(10):
        followed = path.following(position, digests[position])
        assert followed == digests[position:num_held] and not path.following(position, b"other")
