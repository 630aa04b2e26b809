"""Flags and the YAML file, and their precedence."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from quintet import deploy, wire
from quintet.deploy.cli import serve
from quintet.deploy.config.flag_table import flag_table, make_options, merged_options, read_config_file
from quintet.deploy.config.flags import Options
from quintet.deploy.python_api.engine import options_of_call
from quintet.wire.errors import ConfigError


def parsed(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    serve.add_option_arguments(parser)
    return serve.options_of(parser.parse_args(list(words)))[0]


def test_no_arguments_give_the_defaults() -> None:
    assert parsed() == Options()


def test_every_kind_of_flag() -> None:
    options = parsed(
        "folder", "--port", "0", "--api-key", "a", "--api-key", "b", "--no-enable-prefix-caching", "--step-ms", "2.5",
        "--scheduling-policy", "PRIORITY", "--kv-cache-memory", "2GiB", "--log-level", "debug",
    )  # fmt: skip
    assert options == Options(
        model="folder", port=0, api_key=["a", "b"], enable_prefix_caching=False, step_ms=2.5,
        scheduling_policy="priority", kv_cache_memory="2GiB", log_level="DEBUG",
    )  # fmt: skip


def test_every_flag_has_help_and_default() -> None:
    parser = argparse.ArgumentParser()
    serve.add_option_arguments(parser)
    text = " ".join(parser.format_help().split())
    for spec in flag_table():
        assert spec.flag.help
        assert spec.option in text or spec.key == "model"
    assert text.count("(default:") == len(flag_table())


def test_every_option_is_read() -> None:
    folders = Path(deploy.__file__).parent, Path(wire.__file__).parent
    sources = [path for folder in folders for path in folder.rglob("*.py") if path.name != "flags.py"]
    text = "\n".join(path.read_text() for path in sources)
    names = [each.name for each in dataclasses.fields(Options)]
    unread = {name for name in names if not re.search(rf'options\.{name}\b|"{name}"', text)}
    assert unread == {"enable_auto_tool_choice"}  # vLLM needs it; here calls are always parsed


def test_flags_override_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1234\nmax-num-seqs: 7\nenable_prefix_caching: false\napi-key: secret\nmodel: m\n")
    options = parsed("--config", str(file), "--max-num-seqs", "9")
    assert options == Options(
        port=1234, max_num_seqs=9, enable_prefix_caching=False, api_key=["secret"], model="m"
    )
    assert parsed("other", "--config", str(file)).model == "other"


def test_empty_file_has_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("# nothing yet\n")
    assert merged_options(file, {}) == (Options(), [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_modle_len: 10", "unknown key 'max_modle_len'; did you mean 'max_model_len'?"),
        ("max-num-seq: 10", "unknown key 'max-num-seq'; did you mean 'max_num_seqs'?"),
        ("xyzzy: 1", "unknown key 'xyzzy'; `quintet serve --help` lists the valid ones"),
        ("port: eighty", "port is 'eighty', which is not int"),
        ("dtype: int3", "dtype is 'int3', which is not one of auto, bfloat16, float16, float32"),
        ("enable-prefix-caching: maybe", "enable_prefix_caching is 'maybe', which is not true or false"),
        (
            "no-enable-prefix-caching: maybe",
            "no_enable_prefix_caching is 'maybe', which is not true or false",
        ),
        ("api-key: [1]", "api_key is [1], which is not str"),
        ("- port", "must be a mapping"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_invalid_file_names_key_and_fix(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    assert complaint in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        read_config_file(tmp_path / "absent.yaml")


def test_keyword_arguments_are_checked_like_flags() -> None:
    assert make_options({"max_model_len": 8}, "LLM(...)").max_model_len == 8
    with pytest.raises(
        ConfigError, match=r"LLM\(\.\.\.\): unknown key 'max_model_length'; did you mean 'max_model_len'"
    ):
        make_options({"max_model_length": 8}, "LLM(...)")


RENAMED: list[tuple[list[str], dict[str, object], str]] = [
    (["--depth", "1"], {"max_steps_in_flight": 1}, "--depth is deprecated; use --max-steps-in-flight"),
    (["--no-spares"], {"standby": False}, "--spares is deprecated; use --standby"),
    (
        ["--no-refuse-hopeless"],
        {"deadline_admission": False},
        "--refuse-hopeless is deprecated; use --deadline-admission",
    ),
    (["--role", "alone"], {"role": "none"}, "--role alone is deprecated; use --role none"),
]


@pytest.mark.parametrize(("words", "changes", "line"), RENAMED)
def test_an_old_name_is_accepted_with_one_deprecation_line(
    words: list[str], changes: dict[str, object], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parsed(*words) == make_options(changes, "the test")
    assert caplog.messages == [line]


def test_old_names_in_a_file_are_accepted_and_flags_win(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("depth: 3\nrefuse-hopeless: false\nspares: false\nrole: alone\n")
    options, _ = merged_options(file, {"max_steps_in_flight": 1})
    assert options == Options(max_steps_in_flight=1, deadline_admission=False, standby=False)
    assert sorted(caplog.messages) == sorted(line for _, _, line in RENAMED)


def test_old_keyword_arguments_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    assert options_of_call(None, {"depth": 1, "role": "alone"}, "LLM(...)").max_steps_in_flight == 1
    assert caplog.messages == [RENAMED[0][2], RENAMED[3][2]]


def test_old_names_are_hidden_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    serve.add_option_arguments(parser)
    assert not {"--depth", "--spares", "--refuse-hopeless"} & set(parser.format_help().split())


def test_flags_and_options_have_the_same_names() -> None:
    assert [spec.key for spec in flag_table()] == [field.name for field in dataclasses.fields(Options)]
