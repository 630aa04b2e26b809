"""`quintet admin kv` and /kv on a real server with a disk tier, and pins after kills of processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.kv.test_kv_disk import PROMPT, ask
from tests.processes.server import Server, serve, wait_until
from tests.processes.test_admin import admin

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory", "8MiB", "--threads", "1", "--audit")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kv")
    with serve(*FLAGS, "--kv-disk", str(folder), "--kv-disk-size", "16MiB") as server:
        yield server


def listed(server: Server, *words: str) -> list[str]:
    answer = admin(server, "kv", "list", *words)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def export(server: Server, file: Path) -> None:
    """Export the prompt's KV to a file once all its blocks are on disk."""
    exported: list[subprocess.CompletedProcess[str]] = []

    def is_exported() -> bool:
        exported.append(admin(server, "kv", "export", str(file), "--prompt", PROMPT))
        return exported[-1].returncode == 0

    wait_until(is_exported, "an export")
    assert exported[-1].stdout.startswith("exported: "), exported[-1]


def test_list_pin_unpin_and_evict(server: Server) -> None:
    first = ask(server)
    head, row = listed(server)
    assert "1 prefixes in" in head and "0 pinned" in head
    name = row.split()[0]
    assert "pinned" not in row and "memory" in row and PROMPT[:20] not in row
    wait_until(lambda: " disk" in listed(server)[1], "blocks on disk")
    assert any(PROMPT[:20] in line for line in listed(server, "--text"))
    pinned = admin(server, "kv", "pin", "--prompt", PROMPT)
    assert pinned.returncode == 0 and pinned.stdout.startswith("pinned: "), pinned.stderr
    refused = admin(server, "kv", "evict", name)
    assert refused.returncode == 1 and "is pinned; unpin it first" in refused.stderr
    assert admin(server, "kv", "unpin", pinned.stdout.split()[1][:8]).returncode == 0
    evicted = admin(server, "kv", "evict", "--prompt", PROMPT)
    assert evicted.stdout.startswith("evicted: "), evicted.stderr
    assert not [line for line in listed(server)[1:] if name in line]
    assert ask(server) == first, "the prompt is recomputed"


def test_exported_prefix_is_imported_by_another_server(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "prompt.kv"
    text, _ = ask(server)
    export(server, file)
    assert "already exists" in admin(server, "kv", "export", str(file), "--prompt", PROMPT).stderr
    with serve(*FLAGS, "--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "16MiB") as other:
        imported = admin(other, "kv", "import", str(file))
        assert imported.returncode == 0 and " 0 damaged" in imported.stdout, imported.stderr
        again, num_cached = ask(other)
        assert again == text and num_cached > 0
        file.write_bytes(file.read_bytes()[:-1])
        refused = admin(other, "kv", "import", str(file))
        assert refused.returncode == 1 and "it was truncated or extended" in refused.stderr
        assert [path.name for path in (tmp_path / "kv" / "exchange").iterdir()] == []


def test_kv_routes_require_the_admin_key(server: Server) -> None:
    assert server.get("/kv")[0] == 401
    assert server.post("/kv/evict", {"id": "0" * 8})[0] == 401
    unknown = admin(server, "kv", "burn")
    assert unknown.returncode == 78 and "'kv burn' is not a command" in unknown.stderr


@pytest.mark.whole
def test_pin_survives_kills_of_core_and_executor(server: Server) -> None:
    ask(server)
    assert admin(server, "kv", "pin", "--prompt", PROMPT).returncode == 0
    for role in ("executor", "core", "executor"):
        victim = server.children()[f"quintet-{role}-0"]
        victim.kill()
        victim.wait(30)
        ask(server)  # the response implies that both processes are ready and connected
        wait_until(
            lambda: " pinned\n" in admin(server, "kv", "list").stdout, f"the pin after a kill of the {role}"
        )
    assert ask(server)[1] > 0
    assert admin(server, "kv", "unpin", "--prompt", PROMPT).returncode == 0


@pytest.mark.whole
@pytest.mark.parametrize(("size", "stages"), [("2", "1"), ("1", "2"), ("2", "2")])
def test_exported_prefix_of_ranks_is_imported(size: str, stages: str, tmp_path: Path) -> None:
    """With a kill of a rank before and after the export. One process imports files of stages, not of tensor ranks."""
    file, last = tmp_path / "prompt.kv", f"quintet-executor-0-rank-{int(size) * int(stages) - 1}"
    ranks = ("--tensor-parallel-size", size, "--pipeline-parallel-size", stages)

    def disk(name: str) -> tuple[str, ...]:
        return ("--kv-disk", str(tmp_path / name), "--kv-disk-size", "16MiB")

    with serve(*FLAGS, *ranks, *disk("one")) as server:
        text, num_cached = ask(server)
        assert num_cached == 0
        assert admin(server, "kv", "pin", "--prompt", PROMPT).returncode == 0
        wait_until(lambda: " disk" in listed(server)[1], "blocks on disk")
        server.children()[last].kill()
        assert ask(server)[0] == text
        assert " pinned\n" in admin(server, "kv", "list").stdout
        export(server, file)
    with serve(*FLAGS, *ranks, *disk("other")) as other:
        imported = admin(other, "kv", "import", str(file))
        assert imported.returncode == 0 and " 0 damaged" in imported.stdout, imported.stderr
        again, num_cached = ask(other)
        assert again == text and num_cached > 0
        other.children()[last].kill()
        assert ask(other)[0] == text
    with serve(*FLAGS, *disk("third")) as single:
        imported = admin(single, "kv", "import", str(file))
        if size == "1":
            again, num_cached = ask(single)
            assert imported.returncode == 0 and again == text and num_cached > 0, imported.stderr
        else:
            assert imported.returncode == 1 and "its bits may differ" in imported.stderr
