"""Replay of a server's recording to each process: same schedule, tokens and text."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.deploy.cli.main import main
from quintet.deploy.tools.replay.compare import decoded
from quintet.deploy.tools.replay.roles import replay
from quintet.process import record
from quintet.process.record import Recorder, Recording, RecordingError, open_recording
from quintet.wire.codec import encode
from quintet.wire.ids import WorkerId
from quintet.wire.step import StepResult
from quintet.wire.supervision import Topology

from .server import Server, serve

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 24, "seed": 1},
    {"prompt": "Once upon a time there was", "max_tokens": 30, "temperature": 0, "logprobs": 3},
    {"prompt": "Rain " * 60, "max_tokens": 12, "n": 3, "seed": 7, "presence_penalty": 0.5},
    {"prompt": "Rain " * 60 + "fell", "max_tokens": 20, "stop": ["e", "\n"], "seed": 3},
    {"prompt": ["one", "two"], "max_tokens": 9, "seed": 5, "echo": True},
    {"prompt": "word " * 400, "max_tokens": 5, "seed": 6},
]


def send_all_requests(server: Server) -> None:
    """Send requests of all kinds concurrently."""
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda body=body: answers.append(server.post("/v1/completions", body)[0]))
        for body in REQUESTS * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * len(answers) and len(answers) == 4 * len(REQUESTS)
    assert server.post("/detokenize", {"tokens": list(range(300, 340))})[0] == 200
    assert server.post("/tokenize", {"prompt": "how many"})[0] == 200


@pytest.mark.parametrize("executor", [pytest.param("torch", marks=pytest.mark.whole), "mock"])
def test_replay_equals_the_recording(
    executor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recording"
    flags = (
        "--executor",
        executor,
        "--record",
        str(folder),
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "1024",
    )
    with serve(*flags, "--kv-cache-memory", "4MiB", "--threads", "1") as server:
        send_all_requests(server)
        send_all_requests(server)
        assert server.gauge("quintet:rejected_frames_total") == 0
        assert server.stop() == 0
    for worker in ("core-0.1", "detokenizer-0.1", "executor-0.1", "tokenizer-0.1"):
        status = main(["replay", str(folder), worker])
        said = capsys.readouterr().out
        assert status == 0, said
        assert "all equal" in said
        assert " 0 frames out" not in said
    assert main(["replay", str(folder), "frontend-0.1"]) == 2
    assert "cannot be replayed" in capsys.readouterr().err
    again = [sys.executable, "-m", "quintet.deploy.cli.main", "serve", "--port", "0", "--record", str(folder)]
    assert subprocess.run(again, capture_output=True, check=False).returncode == 78
    if executor == "mock":
        _check_replay_of_a_wrapped_ring(folder, tmp_path / "wrapped", monkeypatch)
        _check_difference_is_located(folder)


def _check_replay_of_a_wrapped_ring(folder: Path, wrapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ring overwrote its start, processes without state when idle are replayed from an idle moment."""
    monkeypatch.setattr(record, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(record, "SEGMENTS", num_segments := 8)
    num_turns: dict[str, int] = {}
    for worker in ("detokenizer-0.1", "core-0.1"):
        whole = open_recording(folder, worker)
        num_turns[worker] = sum(1 for _ in whole.turns())
        size = sum(path.stat().st_size for path in whole.segments)
        heads = num_segments * len(msgspec.json.encode(whole.header))
        # The ring holds more than half of the turns: all processes were idle once between the two rounds.
        config = msgspec.structs.replace(
            whole.header.config, record=str(wrapped), record_bytes=size * 3 // 4 + heads
        )
        _record_again(whole, Recorder(whole.header.worker, config))
    account = replay(open_recording(wrapped, "detokenizer-0.1"))
    assert account.difference is None
    assert 0 < account.num_turns < num_turns["detokenizer-0.1"]
    assert account.num_sent > 10
    with pytest.raises(RecordingError, match="segments of the recording were overwritten"):
        replay(open_recording(wrapped, "core-0.1"))


def _record_again(recording: Recording, recorder: Recorder) -> None:
    for turn in recording.turns():
        for payload in turn.frames:
            recorder.received(memoryview(payload))
        recorder.begin_iteration(turn.now_ns, turn.was_idle)
        for payload in turn.frames:
            if isinstance(decoded(payload), Topology):
                recorder.topology = payload
        for sent in turn.sent:
            recorder.sent(WorkerId(sent.role, sent.index, 1), sent.payload)
    recorder.close()


def _check_difference_is_located(folder: Path) -> None:
    """Change one recorded token: the replay names step, column and index."""
    recording = open_recording(folder, "executor-0.1")
    (segment,) = recording.segments
    found = next(
        each.payload
        for turn in recording.turns()
        for each in turn.sent
        if len(each.payload) > 40  # a result with tokens, not the capacity
    )
    whole = segment.read_bytes()
    at = whole.index(found)
    changed = bytearray(whole)
    tokens_at = at + found.index(_token_column(found))
    changed[tokens_at] ^= 1
    segment.write_bytes(changed)
    difference = replay(open_recording(folder, "executor-0.1")).difference
    assert difference is not None
    assert "StepResult of step" in difference
    assert "token_ids[0]" in difference
    assert "recorded" in difference and "replayed" in difference


def _token_column(payload: bytes) -> bytes:
    result = msgspec.msgpack.decode(payload, type=StepResult)
    assert encode(result) == payload
    return result.token_ids
