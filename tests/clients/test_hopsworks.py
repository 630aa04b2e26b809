"""The Hopsworks predictor script, called as by its model server, which no package contains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from quintet.deploy.config.flag_table import read_config_file
from quintet.deploy.embedded import default_model_path
from quintet.wire.errors import RequestError

FOLDER = Path(__file__).parents[2] / "deploy" / "integrations" / "hopsworks"


def test_predictor_loads_a_model_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("hopsworks_predictor", FOLDER / "predictor.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert read_config_file(FOLDER / "server.yaml")
    config = tmp_path / "server.yaml"
    config.write_text("executor: mock\nkv-cache-memory: 16MiB\nmax-model-len: 64\n")
    monkeypatch.setenv("MODEL_FILES_PATH", str(default_model_path()))
    monkeypatch.setenv("CONFIG_FILE_PATH", str(config))
    assert script.Predict is script.Predictor, "Hopsworks versions differ in the class name"
    predictor = script.Predictor()
    first, second, long = predictor.predict(
        [
            {"prompt": "def f(x):", "max_tokens": 4, "ignore_eos": True},
            {"prompt": "def f(x):", "max_tokens": 8, "ignore_eos": True, "stop": "zq"},
            "x " * 500,
        ]
    )["predictions"]
    for answer in (first, second):
        assert (answer["finish_reason"], answer["error"]) == ("length", "") and answer["text"]
    assert (long["text"], long["finish_reason"]) == ("", "error") and "64" in long["error"]
    with pytest.raises(RequestError, match="send a text"):
        predictor.predict([5])
    with pytest.raises(RequestError, match="beams is not a supported parameter"):
        predictor.predict([{"prompt": "x", "beams": 2}])
