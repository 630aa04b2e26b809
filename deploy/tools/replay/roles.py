"""Replay of each process role: the serving class, with a recording instead of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quintet.core.main import Core
from quintet.deploy.tools.replay.playback import EndOfRecording, Playback, ReplayAccount
from quintet.detokenizer_proc.main import prepare as prepare_detokenizer
from quintet.detokenizer_proc.main import serve as serve_detokenizer
from quintet.executor.main import serve as serve_executor
from quintet.process.record import Recording, RecordingError
from quintet.process.runtime import Process, Stopping
from quintet.process.wires import Wires
from quintet.process.work_journal import NUM_BYTES, entries_of
from quintet.tokenizer_proc.encode import load_encoder
from quintet.tokenizer_proc.main import Tokenizer
from quintet.wire.ids import Role

STATELESS_WHEN_IDLE = frozenset({Role.TOKENIZER, Role.DETOKENIZER})
"""Roles without state when idle; their replay can start at any idle moment."""


def replay(recording: Recording) -> ReplayAccount:
    """Replay a recording on its process role. Raises `RecordingError` if that is impossible."""
    header = recording.header
    role = header.worker.role
    if role not in _REPLAYERS:
        raise RecordingError(
            f"{header.worker} cannot be replayed: the recording does not contain its clients' requests. "
            f"Supported roles: {', '.join(sorted(_REPLAYERS))}."
        )
    if not recording.is_whole and role not in STATELESS_WHEN_IDLE:
        raise RecordingError(
            f"{header.worker}: the first {header.segment - 1} segments of the recording were overwritten, so the state of the "
            f"{role} is unknown. Record with a larger --record-mb, or restart the {role}: its replay starts there."
        )
    if role is Role.EXECUTOR and (header.config.cache.disk or header.config.cache.store):
        raise RecordingError(
            f"{header.worker} cannot be replayed: the recording does not contain its reads from --kv-disk or --kv-store."
            " Replay its core instead."
        )
    playback = Playback(recording, in_order=role is not Role.TOKENIZER)
    wires = Wires(playback, playback, playback.clock, playback.close)
    cache = msgspec.structs.replace(header.config.cache, events=None)
    executor = msgspec.structs.replace(
        header.config.executor, hosts=None
    )  # all stages on this host give the same bits
    config = msgspec.structs.replace(header.config, trace=None, cache=cache, executor=executor)
    process: Process[Any] = Process(header.worker, config, None, wires)
    with contextlib.suppress(EndOfRecording, Stopping):
        _REPLAYERS[role](process)
    return playback.finish()


def _replay_tokenizer(process: Process[Any]) -> None:
    """Replay iteration by iteration, waiting for all lanes after each; their order is not recorded."""
    loop = asyncio.new_event_loop()
    journal = entries_of(bytearray(NUM_BYTES))
    service = Tokenizer(process, load_encoder(process.config.model), loop, journal)

    async def play() -> None:
        while True:
            for message in process.receive():
                service.handle(message)
            while process.pending:
                await asyncio.sleep(0.001)

    try:
        loop.run_until_complete(play())
    finally:
        service.close()
        loop.close()


_REPLAYERS: Mapping[Role, Callable[[Process[Any]], None]] = {
    Role.CORE: lambda process: Core(process).run(),
    Role.DETOKENIZER: lambda process: serve_detokenizer(process, prepare_detokenizer(process.config)),
    Role.EXECUTOR: serve_executor,
    Role.TOKENIZER: _replay_tokenizer,
}
