"""Command line: help without heavy imports, plans, and one-line errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.deploy.cli import collect_env
from quintet.deploy.cli.main import COMMANDS, main
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library
from quintet.wire.errors import ConfigError
from tests.deploy.config.model_folder import write_model, write_weights


def test_help_lists_every_command_without_importing_any(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from quintet.deploy.cli.main import main; main([]); "
        "print([m for m in sys.modules if 'deploy.cli.' in m and not m.endswith('main')])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in answer.stdout for name in COMMANDS)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("quintet 0.")


def test_flags_without_a_command_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "folder", "--lora-target-modules", "a"]) == 78
    assert "--lora-target-modules is not supported" in capsys.readouterr().err


def test_serve_help_shows_groups_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for words in ("KV cache:", "scheduling:", "examples:", "--no-enable-prefix-caching", "SIGTERM"):
        assert words in text


def test_plan_of_a_local_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path)
    write_weights(folder / "model.safetensors", {"w": [100, 50]})
    words = [
        "plan",
        str(folder),
        "--device",
        "cpu",
        "--kv-cache-memory",
        "1MiB",
        "--frontends",
        "2",
        "--port",
        "1234",
    ]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_parameters"] == 5000
    assert plan["weight_bytes"] == 10_000
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert plan["num_blocks"] == (1 << 20) // (256 * 16)
    assert plan["max_full_length_requests"] == 8
    assert plan["processes"] == {"frontend": 2, "tokenizer": 1, "core": 1, "executor": 1, "detokenizer": 1}
    assert plan["address"] == "127.0.0.1:1234"
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "5,000 parameters, 9.8 KiB on disk" in text
    assert "layers            2: RMS before; rotated; attention; gated silu" in text
    assert "8 of full length (512 tokens) fit" in text


def test_plan_shows_tokens_per_kv_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path)
    write_weights(folder / "model.safetensors", {"a": [100, 50]})
    words = ["plan", str(folder), "--device", "cpu", "--kv-cache-memory", "1MiB", "--kv-cache-dtype", "int8"]
    assert main([*words, "--json"]) == 0
    formats = json.loads(capsys.readouterr().out)["kv_formats"]
    heads, mib = 2 * 2 * 2, 1 << 20  # heads of 16 numbers
    assert formats == [
        {
            "name": name,
            "dtype": dtype,
            "bytes_per_token": heads * size,
            "num_tokens": mib // (heads * size * 16) * 16,
        }
        for name, dtype, size in (
            ("model", "bfloat16", 32),
            ("int8", "int8", 20),
            ("int4", "int4", 12),
            ("fp8", "fp8", 16),
        )
    ]
    assert main(words) == 0
    assert "KV as int4" in capsys.readouterr().out


def test_plan_shows_blocks_of_each_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
    )
    write_weights(folder / "model.safetensors", {"w": [100, 50]})
    words = ["plan", str(folder), "--device", "cpu", "--kv-cache-memory", "1MiB"]
    words += ["--max-num-batched-tokens", "256"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_groups"] == [
        {"kind": "full", "window": 0, "num_groups": 1, "num_layers": 1, "blocks_per_request": 32},
        {"kind": "sliding", "window": 64, "num_groups": 2, "num_layers": 2, "blocks_per_request": 42},
    ]
    assert plan["max_full_length_requests"] == plan["num_blocks"] // 74
    assert main(words) == 0
    assert "sliding window of 64 tokens, 2 layers in 2 groups: at most 42 blocks" in capsys.readouterr().out


def test_max_num_seqs_follows_a_small_step_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max-num-batched-tokens: 64\n")
    model = [str(write_model(tmp_path / "model")), "--executor", "mock"]
    for words in (["--max-num-batched-tokens", "64"], ["--config", str(file)]):
        assert main(["plan", *model, *words, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (64, 64)
        assert plan["notes"] == [
            "max_num_seqs is 64, not 256: --max-num-batched-tokens 64 has one token for each"
        ]
    assert main(["plan", *model, "--max-num-batched-tokens", "64", "--max-num-seqs", "256"]) == 78
    assert "lower --max-num-seqs to 64" in capsys.readouterr().err


def test_python_m_quintet_runs_the_command() -> None:
    command = [sys.executable, "-m", "quintet", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("quintet 0.")


def test_closed_standard_streams_are_opened() -> None:
    """Otherwise the next file gets descriptor 0."""
    program = (
        "import os; from quintet.deploy.cli.main import main; main([]); print('x', flush=True); "
        "os._exit(os.open(os.devnull, os.O_RDONLY))"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, check=False).returncode == 3


def test_no_writable_temporary_folder_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    assert run_dirs.sweep_stale() == []
    with pytest.raises(ConfigError, match=r"No usable temporary directory.*set TMPDIR to a writable folder"):
        make_run_dir()


def test_config_error_is_one_line_with_exit_status_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(write_model(tmp_path)), "--executor", "mock", "--max-model-len", "9999"]) == 78
    message = capsys.readouterr().err
    assert message.startswith("quintet: --max-model-len is 9999")
    assert message.count("\n") == 1


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "serve", "--executor", "mock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_port_in_use_is_one_line_before_spawning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = serve(str(write_model(tmp_path)), "--port", str(port))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_config_file_with_an_unknown_key_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max-num-seq: 3\n")
    ended = serve("--config", str(file))
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == f"quintet: {file}: unknown key 'max-num-seq'; did you mean 'max_num_seqs'?\n"


def test_collect_env_describes_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quintet"].startswith("0.")
    assert found.keys() == collect_env.describe().keys()
    library = open_library()
    assert library is None or found["cpu kernels"].startswith(instruction_set(library))


def test_run_folders_of_killed_servers_are_removed(tmp_path: Path) -> None:
    stale, living, unmarked = (make_run_dir(tmp_path) for _ in range(3))
    os.close(run_dirs.claim(stale))
    mark = run_dirs.claim(living)
    assert (living / "supervisor.pid").read_text() == f"{os.getpid()}\n"
    assert run_dirs.sweep_stale(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([living, unmarked])
    os.close(mark)
    assert run_dirs.sweep_stale(tmp_path) == [living]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--max-num-sequ=4", "m"], "did you mean --max-num-seqs?"),
        (["plan", "--modell-len", "4"], "unrecognized argument: --modell-len"),
        (["serve", "one", "two"], "unrecognized argument: two"),
        (["serve", "--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_invalid_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err
