"""Flight recorder files: complete iterations, a bounded ring buffer, private to the user."""

import stat
from pathlib import Path

import msgspec
import pytest

from quintet.process import record
from quintet.process.record import Recorder, RecordingError, Sent, open_recording
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    KvStoreConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import full_layers

ME = WorkerId(Role.CORE, 0, 1)
PEER = WorkerId(Role.EXECUTOR, 0, 1)


def config_of(folder: Path, max_bytes: int = 4 << 20) -> EngineConfig:
    return EngineConfig(
        run_dir=str(folder),
        model=ModelConfig(
            path="/nowhere", tokenizer_path="/nowhere", served_names=["fake"], architecture="Fake", dtype="bfloat16",
            vocab_size=8, max_model_len=64, eos_token_ids=[1], kv=full_layers(1, 1, 8, 2, 16),
        ),
        cache=CacheConfig(
            memory_bytes=1 << 20,
            store=KvStoreConfig(url="redis://user:secret-3@host/0", waiting_bytes=0, staging_bytes=0),
        ),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        executor=ExecutorConfig(kind="mock"),
        frontend=FrontendConfig(api_keys=["secret-1"], admin_key="secret-2"),
        processes=ProcessesConfig(),
        record=str(folder / "recording"),
        record_bytes=max_bytes,
    )  # fmt: skip


def fill(recorder: Recorder, num_iterations: int, size: int) -> None:
    for iteration in range(num_iterations):
        recorder.received(memoryview(iteration.to_bytes(4, "little") * size))
        recorder.begin_iteration(1000 + iteration, was_idle=iteration % 2 == 0)
        recorder.sent(PEER, b"answer %d" % iteration)


def test_iterations_are_read_as_recorded(tmp_path: Path) -> None:
    recorder = Recorder(ME, config_of(tmp_path))
    recorder.received(memoryview(b"one"))
    recorder.received(memoryview(b""))
    recorder.begin_iteration(5, was_idle=True)
    recorder.sent(PEER, b"answer")
    recorder.sent(WorkerId(Role.SUPERVISOR, 0, 1), b"heartbeat")
    recorder.begin_iteration(7, was_idle=False)
    recorder.close()
    recording = open_recording(tmp_path / "recording", "core-0.1")
    first, second = recording.turns()
    assert (first.now_ns, first.was_idle, first.frames) == (5, True, [b"one", b""])
    assert first.sent == [Sent(Role.EXECUTOR, 0, b"answer")]
    assert (second.now_ns, second.was_idle, second.frames, second.sent) == (7, False, [], [])
    assert recording.is_whole
    assert recording.header.worker == ME
    assert recording.header.config.model.vocab_size == 8


def test_recording_is_private_and_holds_no_keys(tmp_path: Path) -> None:
    recorder = Recorder(ME, config_of(tmp_path))
    fill(recorder, 3, 1)
    recorder.close()
    folder = tmp_path / "recording" / str(ME)
    (segment,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert b"secret" not in segment.read_bytes()


def test_ring_buffer_keeps_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FLUSH_BYTES", 1 << 10)
    limit = 1 << 20
    recorder = Recorder(ME, config_of(tmp_path, limit))
    recorder.topology = b"topology"
    fill(recorder, 2000, 256)
    recorder.close()
    folder = tmp_path / "recording"
    taken = sum(path.stat().st_size for path in folder.rglob("*.rec"))
    assert 0.8 * limit < taken <= limit
    recording = open_recording(folder, str(ME))
    assert not recording.is_whole
    assert recording.header.topology == b"topology"
    clocks = [iteration.now_ns for iteration in recording.turns()]
    assert clocks == list(range(clocks[0], 1000 + 2000)), "iterations are missing in the middle or at the end"
    assert clocks[0] > 1000


def test_later_epoch_replaces_records_of_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FLUSH_BYTES", 1 << 10)
    limit = 1 << 20
    for epoch in (1, 2):
        recorder = Recorder(WorkerId(Role.CORE, 0, epoch), config_of(tmp_path, limit))
        fill(recorder, 800, 256)
        recorder.close()
    folder = tmp_path / "recording"
    assert sum(path.stat().st_size for path in folder.rglob("*.rec")) <= limit
    assert open_recording(folder, "core-0.2").is_whole
    assert not open_recording(folder, "core-0.1").is_whole


def test_truncated_record_is_skipped(tmp_path: Path) -> None:
    recorder = Recorder(ME, config_of(tmp_path))
    fill(recorder, 3, 8)
    recorder.close()
    (segment,) = (tmp_path / "recording" / str(ME)).iterdir()
    segment.write_bytes(segment.read_bytes()[:-1])
    iterations = list(open_recording(tmp_path / "recording", str(ME)).turns())
    assert [len(iteration.sent) for iteration in iterations] == [1, 1, 0]


def test_invalid_recording_is_named(tmp_path: Path) -> None:
    recorder = Recorder(ME, config_of(tmp_path))
    fill(recorder, 1, 1)
    recorder.close()
    folder = tmp_path / "recording"
    with pytest.raises(RecordingError, match=r"no recording of 'core-0.2'; it has core-0\.1"):
        open_recording(folder, "core-0.2")
    (segment,) = (folder / str(ME)).iterdir()
    segment.write_bytes(b"something else")
    with pytest.raises(RecordingError, match=r"0001\.rec: not a recording"):
        open_recording(folder, str(ME))


def test_disk_error_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(ME, config_of(tmp_path))
    (tmp_path / "recording" / str(ME)).rmdir()
    fill(recorder, 3, 1)
    recorder.close()
    assert "recording ends" in caplog.text


def test_the_config_survives(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
