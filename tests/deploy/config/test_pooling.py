"""``--runner`` and ``--pooler-config``, and folders of sentence-transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model
from tests.deploy.config.test_vllm_flags import parsed

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.pooling import pooling_config
from quintet.wire.errors import ConfigError
from quintet.wire.pooling import PoolingConfig, PoolingType

LAST, MEAN = PoolingType.LAST, PoolingType.MEAN
WIDTH = 64
ST = "sentence_transformers.models."


def config_of(folder: Path, **options: Any) -> tuple[PoolingConfig | None, list[str]]:
    notes: list[str] = []
    given = dataclasses.replace(Options(), **options)
    return pooling_config(given, read_facts(folder), notes), notes


def section(kind: PoolingType, normalize: bool = True) -> PoolingConfig:
    return PoolingConfig(kind=kind, width=WIDTH, normalize=normalize)


def write_modules(folder: Path, pooling: dict[str, Any], *kinds: str) -> Path:
    """Write a folder of sentence-transformers, with these modules."""
    write_model(folder)
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": ST + kind} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (folder / str(module["path"])).mkdir()
        (folder / str(module["path"]) / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"runner": "generate"}, None),
        ({"runner": "pooling"}, section(LAST)),
        ({"pooler_config": {"pooling_type": "MEAN"}}, section(MEAN)),
        ({"pooler_config": {"seq_pooling_type": "last", "use_activation": False}}, section(LAST, False)),
        (
            {"runner": "pooling", "pooler_config": {"normalize": False, "pooling_type": None}},
            section(LAST, False),
        ),
    ],
)
def test_flags(options: dict[str, Any], expected: PoolingConfig | None, tmp_path: Path) -> None:
    assert config_of(write_model(tmp_path), **options)[0] == expected


@pytest.mark.parametrize(
    ("words", "runner", "pooler"),
    [
        (["--runner", "pooling"], "pooling", {}),
        (["--convert", "embed"], "pooling", {}),
        (["--runner", "pooling", "--convert", "embed"], "pooling", {}),
        (["--convert", "none"], "generate", {}),
        (["--task", "embed"], "pooling", {}),
        (["--task", "embedding"], "pooling", {}),
        (["--task", "generate"], "generate", {}),
        (["--override-pooler-config", '{"pooling_type": "MEAN"}'], "auto", {"pooling_type": "MEAN"}),
    ],
)
def test_flags_of_vllm(words: list[str], runner: str, pooler: dict[str, Any]) -> None:
    options, _ = parsed(*words)
    assert (options.runner, options.pooler_config) == (runner, pooler)


OLD = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False}


@pytest.mark.parametrize(
    ("pooling", "kinds", "expected"),
    [
        ({**OLD, "pooling_mode_mean_tokens": True}, ["Transformer", "Pooling"], section(MEAN, False)),
        ({**OLD, "pooling_mode_lasttoken": True}, ["Transformer", "Pooling", "Normalize"], section(LAST)),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Normalize"], section(MEAN)),
        ({"pooling_mode": "lasttoken"}, ["Transformer", "Pooling"], section(LAST, False)),
    ],
)
def test_folders(pooling: dict[str, Any], kinds: list[str], expected: PoolingConfig, tmp_path: Path) -> None:
    folder = write_modules(tmp_path, pooling, *kinds)
    found, notes = config_of(folder)
    assert found == expected and expected.kind.name in notes[0]
    assert config_of(folder, runner="generate") == (None, [])
    changed, _ = config_of(folder, pooler_config={"pooling_type": "LAST", "normalize": True})
    assert changed == section(LAST)


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode": "weightedmean"}, ["Transformer", "Pooling"], "'weightedmean'"),
        (
            {**OLD, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ["Pooling"],
            "max_tokens",
        ),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Dense", "Normalize"], "Dense"),
        ({}, ["Transformer"], "no module Pooling"),
    ],
)
def test_unsupported_folders(pooling: dict[str, Any], kinds: list[str], words: str, tmp_path: Path) -> None:
    """They generate; embeddings need a choice."""
    folder = write_modules(tmp_path, pooling, *kinds)
    found, notes = config_of(folder)
    assert found is None and words in notes[0]
    with pytest.raises(ConfigError, match="--pooler-config") as error:
        config_of(folder, runner="pooling")
    assert words in str(error.value)
    assert config_of(folder, pooler_config={"pooling_type": "MEAN"})[0] == section(MEAN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooler_config": {"pooling_type": "CLS"}}, "'CLS'; it must be one of LAST, MEAN"),
        ({"pooler_config": {"normalize": "yes"}}, "it must be true or false"),
        (
            {"pooler_config": {"enable_chunked_processing": True}},
            "'enable_chunked_processing' is not supported",
        ),
        ({"runner": "pooling", "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"runner": "generate", "pooler_config": {"pooling_type": "MEAN"}}, "drop one of them"),
    ],
)
def test_refused_values(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(write_model(tmp_path), **options)
    assert words in str(error.value)


def test_broken_files(tmp_path: Path) -> None:
    write_model(tmp_path)
    for text in ("[1]", "{}", "[", "null"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ConfigError, match=r"modules\.json"):
            config_of(tmp_path)


def test_models_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    facts = read_facts(folder, model_impl="transformers")
    options = dataclasses.replace(Options(), runner="pooling")
    with pytest.raises(ConfigError, match="not one of Quintet's decoders"):
        pooling_config(options, facts, [])
