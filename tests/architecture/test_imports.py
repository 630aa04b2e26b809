"""Import rules: wire <- process <- every role's folder <- deploy; torch only under executor/.

Function bodies are checked as well: a lazy import is an import.
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
            assert node.level == 0, (
                f"{path}:{node.lineno}: relative import; use an absolute import from quintet"
            )
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
def test_folder_imports_only_itself_and_lower_layers(folder: str) -> None:
    allowed = {folder, "wire"} | ({"process"} if folder in PROCESSES else set())
    violations = [
        f"{where}: {name}"
        for where, name in all_imports(folder)
        if name.startswith("quintet") and (name.split(".")[1:2] or ["?"])[0] not in allowed
    ]
    assert violations == []


CHECKPOINTS = "executor.checkpoints"
CPU_OPS = "executor.backends.cpu.ops"
INNER = {
    "core/kv": {"core.kv", "wire.codec", "wire.embeds", "wire.kv_spec", "wire.kv_tiers"},
    "deploy/integrations/fastchat": {
        *("deploy.integrations.fastchat", "deploy.http_client"),
        *("deploy.supervisor.listener", "frontend", "process.log", "wire"),
    },
    "deploy/http_client": {"deploy.http_client"},
    "deploy/tools/load_client": {"deploy.tools.load_client", "deploy.http_client"},
    "deploy/config": {
        *("deploy.config", "deploy.embedded", "process", "wire", "executor.model_config"),
        *(f"{CHECKPOINTS}.{module}" for module in ("weights.files", "weights.header", "quant.formats")),
        *(f"{CHECKPOINTS}.gguf.{module}" for module in ("hf_config", "header", "parts")),
        *("executor.backends.platforms.cores", "executor.kv_transfer.store.connector"),
        *("detokenizer_proc.parsers", "tokenizer_proc.template_files", "tokenizer_proc.template_environment"),
    },
    "deploy/router": {"deploy.router", "deploy.http_client", "frontend", "wire"},
    "deploy/supervisor": {"deploy.supervisor", "deploy.embedded", "deploy.config.memory", "process", "wire"},
    "executor/model_config": {"executor.model_config", "wire"},
    "executor/checkpoints/gguf": {
        *(f"{CHECKPOINTS}.gguf", f"{CHECKPOINTS}.weights", "executor.model_config", "wire"),
        "executor.backends.platforms.cores",
    },
    "executor/checkpoints/quant/formats": {
        *(f"{CHECKPOINTS}.quant.formats", f"{CHECKPOINTS}.gguf.types", f"{CHECKPOINTS}.weights.header"),
        *("executor.model_config", "wire"),
    },
    "executor/checkpoints/weights": {
        f"{CHECKPOINTS}.weights",
        CPU_OPS,
        "executor.model_config.names",
        "wire",
    },
    "executor/lora": {
        *("executor.lora", "executor.model_config.names", CPU_OPS),
        *(f"{CHECKPOINTS}.quant", f"{CHECKPOINTS}.weights", "wire"),
    },
    "executor/models/layers": {
        *("executor.model_config", "executor.models.layers", "executor.lora", CPU_OPS),
        *(f"{CHECKPOINTS}.quant", f"{CHECKPOINTS}.weights", "wire"),
    },
    "executor/models": {
        *("executor.model_config", "executor.models", "executor.lora", "executor.backends.platforms"),
        *(CPU_OPS, f"{CHECKPOINTS}.quant", f"{CHECKPOINTS}.weights", "wire"),
    },
}
"""Packages within folders, and their permitted imports."""


@pytest.mark.parametrize("folder", INNER)
def test_inner_packages_import_only_lower_layers(folder: str) -> None:
    allowed = tuple(f"quintet.{package}" for package in INNER[folder])
    violations = [
        f"{where}: {name}"
        for where, name in all_imports(folder)
        if name.startswith("quintet")
        and not f"{name}.".startswith(tuple(f"{package}." for package in allowed))
    ]
    assert violations == []


def test_product_imports_no_tests_or_benchmarks() -> None:
    violations = [
        f"{where}: {name}"
        for folder in ("wire", "process", *PROCESSES, "deploy")
        for where, name in all_imports(folder)
        if name.split(".")[0] in {"tests", "bench"}
    ]
    assert violations == []


@pytest.mark.parametrize("folder", sorted(THIRD_PARTY))
def test_third_party_packages_are_limited_to_their_folders(folder: str) -> None:
    allowed = set(sys.stdlib_module_names) | THIRD_PARTY[folder] | {"quintet"}
    violations = [
        f"{where}: {name}" for where, name in all_imports(folder) if name.split(".")[0] not in allowed
    ]
    assert violations == []


def test_torch_is_imported_under_executor_only() -> None:
    folders = ("wire", "process", "deploy", *(f for f in PROCESSES if f != "executor"))
    violations = [
        f"{where}: {name}"
        for folder in folders
        for where, name in all_imports(folder)
        if name.split(".")[0] in {"torch", "transformers", "cupy"}
    ]
    assert violations == []


def test_a_configuration_is_resolved_without_torch() -> None:
    """It uses functions of the executor; torch would add a second."""
    code = "import sys, quintet.deploy.config.build; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"


def test_zmq_in_the_core_is_imported_by_main_only() -> None:
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
    """The mock needs no torch, and weights are read from disk while torch is imported."""
    code = "import sys, quintet.executor.main; print('torch' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"
