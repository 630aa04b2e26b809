"""How each kind of process is played to: the class that serves, with a recording in the place of its sockets."""

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
from quintet.process.runtime import Process, Stopping, Wires
from quintet.tokenizer_proc.encode import load_encoder
from quintet.tokenizer_proc.main import Tokenizer
from quintet.wire.ids import Role

FORGETFUL = frozenset({Role.TOKENIZER, Role.DETOKENIZER})
"""Roles that remember nothing when nothing is pending: they can be played to from such a moment."""


def replay(recording: Recording) -> ReplayAccount:
    """Play a recording to the process it is of. Raises `RecordingError` when that cannot be done."""
    header = recording.header
    role = header.worker.role
    if role not in _PLAYERS:
        raise RecordingError(
            f"{header.worker} cannot be played to: what its clients sent is not in the recording. "
            f"Roles that can: {', '.join(sorted(_PLAYERS))}."
        )
    if not recording.is_whole and role not in FORGETFUL:
        raise RecordingError(
            f"{header.worker}: the first {header.segment - 1} segments of the recording are gone, and what they did to "
            f"the {role} with them. Record with a larger --record-mb, or have a {role} begin anew: it can be played to "
            "from where it began."
        )
    if role is Role.EXECUTOR and (header.config.cache.disk or header.config.cache.store):
        raise RecordingError(
            f"{header.worker} cannot be played to: what it read from --kv-disk or --kv-store is not in the recording. Its core"
            " can."
        )
    playback = Playback(recording, in_order=role is not Role.TOKENIZER)
    wires = Wires(playback, playback, playback.clock, playback.close)
    cache = msgspec.structs.replace(header.config.cache, events=None)
    executor = msgspec.structs.replace(header.config.executor, hosts=None)  # all stages here: the same bits
    config = msgspec.structs.replace(header.config, trace=None, cache=cache, executor=executor)
    process: Process[Any] = Process(header.worker, config, None, wires)
    with contextlib.suppress(EndOfRecording, Stopping):
        _PLAYERS[role](process)
    return playback.finish()


def _play_core(process: Process[Any]) -> None:
    Core(process).run()


def _play_tokenizer(process: Process[Any]) -> None:
    """Play turn by turn, waiting for the lanes after each: in which order they ended then is not in the recording."""
    loop = asyncio.new_event_loop()
    service = Tokenizer(process, load_encoder(process.config.model), loop)

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


_PLAYERS: Mapping[Role, Callable[[Process[Any]], None]] = {
    Role.CORE: _play_core,
    Role.DETOKENIZER: lambda process: serve_detokenizer(process, prepare_detokenizer(process.config)),
    Role.EXECUTOR: serve_executor,
    Role.TOKENIZER: _play_tokenizer,
}
