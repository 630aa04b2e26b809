"""Choice of a back end: candidates by configuration, and the next one if a back end cannot run the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.executor.test_memory_prefault import config_of

from quintet.executor.backends.registry import BACKENDS, Backend, Unsupported, candidates, make_worker
from quintet.executor.context import WorkerContext
from quintet.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"kind": "mock"}, ["mock"]),
        ({"device": "cpu"}, ["cpu", "torch"]),
        ({"device": "cuda"}, ["cuda", "torch"]),
        ({"device": "of a package"}, ["torch"]),
        ({"tensor_parallel_size": 2}, ["cpu"]),
        ({"pipeline_parallel_size": 2}, ["cpu"]),
        ({"sum_leaves": 4}, ["cpu"]),
    ],
    ids=str,
)
def test_candidates_of_a_configuration(changes: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    assert candidates(config_of(tmp_path, **changes)) == names


def test_models_of_transformers_have_a_back_end_of_their_own(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = msgspec.structs.replace(config.model, implementation="transformers")
    assert candidates(msgspec.structs.replace(config, model=model)) == ["transformers"]


@pytest.mark.parametrize("refusing", [["cpu"], ["cpu", "torch"]], ids=str)
def test_the_next_candidate_runs_what_a_back_end_cannot(
    refusing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contexts: list[WorkerContext] = []

    def unsupported(context: WorkerContext) -> None:
        contexts.append(context)
        raise Unsupported("a reason")

    for name in ("cpu", "torch"):
        function = "unsupported" if name in refusing else "supported"
        monkeypatch.setitem(BACKENDS, name, Backend(f"{__name__}:{function}"))
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "unsupported", unsupported, raising=False)
    monkeypatch.setattr(module, "supported", contexts.append, raising=False)
    if "torch" in refusing:
        with pytest.raises(ConfigError, match="a reason"):
            make_worker(config_of(tmp_path))
    else:
        make_worker(config_of(tmp_path))
    assert "a reason" in caplog.text
    assert len(contexts) == 2 and contexts[0] is contexts[1], "a loaded model is kept for the next candidate"
