"""The import rule of the house: wire <- process <- every role's folder <- deploy; torch only under executor/.

Function bodies are read as well: a lazy import is an import.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.architecture.statements import statements

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc")
THIRD_PARTY = {
    "wire": {"msgspec"},
    "process": {"msgspec", "zmq", "setproctitle", "llguidance"},
    "frontend": {"httptools", "msgspec", "starlette", "uvicorn", "uvloop", "prometheus_client"},
    "tokenizer_proc": {"msgspec", "tokenizers", "jinja2", "uvloop", "llguidance"},
    "core": {"msgspec", "numpy"},
    "detokenizer_proc": {"msgspec", "tokenizers"},
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in statements(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it from quintet down"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@functools.cache
def all_imports(folder: str) -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imports_of(path)
    ]


@pytest.mark.parametrize("folder", ("wire", "process", *PROCESSES))
def test_a_folder_imports_only_itself_and_what_is_below(folder: str) -> None:
    allowed = {folder, "wire"} | ({"process"} if folder in PROCESSES else set())
    strangers = [
        f"{where}: {name}"
        for where, name in all_imports(folder)
        if name.startswith("quintet") and (name.split(".")[1:2] or ["?"])[0] not in allowed
    ]
    assert strangers == []


CHECKPOINTS = "executor.checkpoints"
CPU_OPS = "executor.backends.cpu.ops"
INNER = {
    "core/kv": {"core.kv", "wire.codec", "wire.kv_spec", "wire.kv_tiers"},
    "deploy/integrations/fastchat": {
        *("deploy.integrations.fastchat", "deploy.tools.load_client", "deploy.router.connection_pool"),
        *("deploy.supervisor.listener", "frontend", "process.log", "wire"),
    },
    "deploy/tools/load_client": {"deploy.tools.load_client"},
    "deploy/config": {
        *("deploy.config", "deploy.embedded", "process", "wire", "executor.model_config"),
        *(f"{CHECKPOINTS}.{module}" for module in ("weights.files", "weights.header", "quant.formats")),
        *(f"{CHECKPOINTS}.gguf.{module}" for module in ("card", "header", "parts")),
        *("executor.backends.platforms.cores", "executor.kv_transfer.store.connector"),
        *("detokenizer_proc.parsers", "tokenizer_proc.chat_template"),
    },
    "deploy/router": {"deploy.router", "deploy.tools.load_client", "frontend", "wire"},
    "deploy/supervisor": {"deploy.supervisor", "deploy.embedded", "deploy.config.memory", "process", "wire"},
    "executor/model_config": {"executor.model_config", "wire"},
    "executor/checkpoints/gguf": {
        *(f"{CHECKPOINTS}.gguf", f"{CHECKPOINTS}.weights", "executor.model_config", "wire"),
    },
    "executor/checkpoints/quant/formats": {
        *(f"{CHECKPOINTS}.quant.formats", f"{CHECKPOINTS}.gguf.types", f"{CHECKPOINTS}.weights.header"),
        *("executor.model_config", "wire"),
    },
    "executor/checkpoints/weights": {f"{CHECKPOINTS}.weights", CPU_OPS, "wire"},
    "executor/models/layers": {
        *("executor.model_config", "executor.models.layers", CPU_OPS),
        *(f"{CHECKPOINTS}.quant", f"{CHECKPOINTS}.weights", "wire"),
    },
    "executor/models": {
        *("executor.model_config", "executor.models", "executor.backends.platforms"),
        *(CPU_OPS, f"{CHECKPOINTS}.quant", f"{CHECKPOINTS}.weights", "wire"),
    },
}
"""Packages within folders, and all that they may import."""


@pytest.mark.parametrize("folder", INNER)
def test_inner_rooms_know_only_what_is_below_them(folder: str) -> None:
    allowed = tuple(f"quintet.{room}" for room in INNER[folder])
    strangers = [
        f"{where}: {name}"
        for where, name in all_imports(folder)
        if name.startswith("quintet") and not f"{name}.".startswith(tuple(f"{room}." for room in allowed))
    ]
    assert strangers == []


def test_nothing_that_is_installed_imports_tests_or_benchmarks() -> None:
    strangers = [
        f"{where}: {name}"
        for folder in ("wire", "process", *PROCESSES, "deploy")
        for where, name in all_imports(folder)
        if name.split(".")[0] in {"tests", "bench"}
    ]
    assert strangers == []


@pytest.mark.parametrize("folder", sorted(THIRD_PARTY))
def test_third_party_packages_stay_in_their_rooms(folder: str) -> None:
    allowed = set(sys.stdlib_module_names) | THIRD_PARTY[folder] | {"quintet"}
    strangers = [
        f"{where}: {name}" for where, name in all_imports(folder) if name.split(".")[0] not in allowed
    ]
    assert strangers == []


def test_torch_is_imported_under_executor_alone() -> None:
    folders = ("wire", "process", "deploy", *(f for f in PROCESSES if f != "executor"))
    strangers = [
        f"{where}: {name}"
        for folder in folders
        for where, name in all_imports(folder)
        if name.split(".")[0] in {"torch", "transformers", "cupy"}
    ]
    assert strangers == []


def test_a_configuration_is_resolved_without_torch() -> None:
    """Although with functions of the executor's: it would take a second."""
    code = "import sys, quintet.deploy.config.build; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"


def test_zmq_in_the_core_is_mains_business() -> None:
    users = [
        where
        for where, name in all_imports("core")
        if name.startswith(("zmq", "quintet.process.sockets", "quintet.process.runtime"))
    ]
    assert {where.split(":")[0] for where in users} <= {"core/main.py"}


def test_nothing_pickles() -> None:
    folders = ("wire", "process", "deploy", *PROCESSES)
    users = [
        f"{where}: {name}"
        for folder in folders
        for where, name in all_imports(folder)
        if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    ]
    assert users == []


@pytest.mark.parametrize("role", ("frontend", "tokenizer_proc", "core", "detokenizer_proc"))
def test_only_the_executor_loads_torch(role: str) -> None:
    code = f"import sys, quintet.{role}.main; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_executor_loads_torch_with_its_worker() -> None:
    """So that the mock needs none, and the weights are read from the disk while torch is imported."""
    code = "import sys, quintet.executor.main; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"
