"""The choice of a kernel's compiled form for a device, and the packing of launch arguments; no device is needed."""

from __future__ import annotations

import ctypes
import logging
import struct
from pathlib import Path

import pytest
import torch

from quintet.executor.backends.cuda.device import Argument, ArgumentBuffer, Kernel, LaunchError
from quintet.executor.backends.cuda.kernels.modules import (
    KINDS,
    Kind,
    ModuleStore,
    RefusedError,
    digest,
    forms,
    modules,
    record_path,
    source_text,
)
from quintet.wire.errors import ConfigError


@pytest.fixture
def sources(tmp_path: Path) -> SourceTree:
    return SourceTree(tmp_path)


class SourceTree:
    """A folder of sources with one module, and its compiled outputs."""

    def __init__(self, root: Path) -> None:
        self.sources, self.built = root / "sources", root / "built"
        self.sources.mkdir()
        self.built.mkdir()
        self.write("norm.cu", '#include "device.cuh"  // first\nnorm\n')
        self.write(
            "device.cuh",
            '#pragma once\n#ifdef E\n#include "emulation/x.hpp"\n#endif\n#include "numbers.cuh"\ndevice\n',
        )
        self.write("numbers.cuh", "#pragma once\n#include <cstdint>\nnumbers\n")

    def write(self, name: str, text: str) -> None:
        (self.sources / name).write_text(text)

    def text(self) -> str:
        return source_text("norm", self.sources)

    def compile(self, *names: str) -> None:
        for name in names:
            path = self.built / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"code")
            entry = "ptxas info : Compiling entry function 'k' for 'sm_90'"
            record_path(path).write_text(f"{digest(self.text())}\nsome compiler\n{entry}\n")

    def forms(self, major: int, minor: int) -> list[str]:
        return [f.path.parent.name for f in forms("norm", (major, minor), self.built, self.sources)[0]]

    def store(self, loader: Loader, kinds: tuple[Kind, ...] = KINDS) -> ModuleStore[str]:
        return ModuleStore((9, 0), loader, kinds, self.built, self.sources)


class Loader:
    """A loader that accepts forms unless the test rejects them, and records its calls."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.requested: list[str] = []
        self.kernels: list[str | None] = []

    def load(self, path: Path, kernel: str | None) -> str:
        self.kernels.append(kernel)
        return self._take(path.parent.name)

    def compile(self, text: str) -> str:
        return self._take("source")

    def _take(self, what: str) -> str:
        self.requested.append(what)
        if what in self.refused:
            raise RefusedError(f"no {what} today")
        return what


def test_module_text_has_each_header_once_with_line_directives(sources: SourceTree) -> None:
    sources.write("norm.cu", '#include "device.cuh"\n#include "numbers.cuh"\nnorm')
    assert sources.text().splitlines() == [
        '#line 1 "norm.cu"',
        '#line 1 "device.cuh"',
        "",
        "#ifdef E",
        '#include "emulation/x.hpp"',
        "#endif",
        '#line 1 "numbers.cuh"',
        "",
        "#include <cstdint>",
        "numbers",
        '#line 6 "device.cuh"',
        "device",
        '#line 2 "norm.cu"',
        "",
        "norm",
    ]


def test_changed_header_changes_the_digest(sources: SourceTree) -> None:
    before = digest(sources.text())
    sources.write("numbers.cuh", "#pragma once\nother numbers\n")
    assert digest(sources.text()) != before


def test_every_module_of_the_checkout_has_a_text() -> None:
    assert modules()
    assert all("QT_KERNEL" in source_text(module) for module in modules())


def test_machine_code_runs_on_its_major_capability_from_its_minor(sources: SourceTree) -> None:
    sources.compile(
        "sm_80/norm.cubin", "sm_89/norm.cubin", "sm_90/norm.cubin", "sm_100/norm.cubin", "ptx/norm.ptx"
    )
    assert sources.forms(9, 0) == ["sm_90", "ptx", "sources"]
    assert sources.forms(8, 6) == ["sm_80", "ptx", "sources"]
    assert sources.forms(8, 9) == ["sm_89", "sm_80", "ptx", "sources"]
    assert sources.forms(10, 3) == ["sm_100", "ptx", "sources"]
    assert sources.forms(12, 0) == ["ptx", "sources"]


def test_output_of_other_sources_is_ignored(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    sources.write("numbers.cuh", "other numbers")
    sources.compile("ptx/norm.ptx")
    found, missing = forms("norm", (9, 0), sources.built, sources.sources)
    assert [form.kind for form in found] == ["ptx", "source"]
    assert missing == ["sm_90/norm.cubin was compiled from other sources"]


def test_output_without_a_record_is_ignored(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin")
    record_path(sources.built / "sm_90/norm.cubin").unlink()
    assert sources.forms(9, 0) == ["sources"]


def test_output_is_trusted_without_sources(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin")
    (sources.sources / "norm.cu").unlink()
    assert sources.forms(9, 0) == ["sm_90"]


def test_next_form_is_tried_when_the_driver_rejects_one(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    for refused, taken in (((), "sm_90"), (("sm_90",), "ptx"), (("sm_90", "ptx"), "source")):
        assert sources.store(Loader(*refused)).get("norm") == taken


def test_module_is_loaded_once(sources: SourceTree) -> None:
    loader = Loader()
    store = sources.store(loader)
    assert store.get("norm") == store.get("norm")
    assert loader.requested == ["source"]


def test_rejected_kernel_is_named_at_load(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    record = record_path(sources.built / "ptx/norm.ptx")
    record.write_text(record.read_text().partition("ptxas")[0])
    loader = Loader("sm_90")
    sources.store(loader).get("norm")
    assert loader.kernels == ["k", None]


def test_only_forms_of_the_given_kinds_are_used(sources: SourceTree) -> None:
    sources.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    assert sources.store(Loader(), ("ptx",)).get("norm") == "ptx"


def test_error_gives_the_reason_of_each_unusable_form(sources: SourceTree) -> None:
    sources.compile("ptx/norm.ptx")
    with pytest.raises(ConfigError) as caught:
        sources.store(Loader("ptx", "source")).get("norm")
    for words in (
        "norm.cu",
        "sm_90/norm.cubin does not exist",
        "no ptx today",
        "no source today",
        "make cubins",
    ):
        assert words in str(caught.value)


def test_chosen_form_is_logged_once_with_its_reason(
    sources: SourceTree, caplog: pytest.LogCaptureFixture
) -> None:
    sources.write("rope.cu", "rope")
    sources.compile("ptx/norm.ptx")
    (sources.built / "ptx/rope.ptx").write_bytes(b"code")
    record_path(sources.built / "ptx/rope.ptx").write_text(digest(source_text("rope", sources.sources)))
    store = sources.store(Loader())
    with caplog.at_level(logging.INFO, "quintet"):
        store.get("norm")
        store.get("rope")
    (line,) = caplog.messages
    assert "PTX" in line and "9.0" in line and "sm_90/norm.cubin does not exist" in line


def read_as_driver(arguments: ArgumentBuffer, kinds: str) -> list[int | float]:
    """Follow the addresses, and read of each parameter the bytes of the kernel's signature."""
    types = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(arguments.address)
    return [types[kind].from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]


def test_arguments_are_packed_as_the_driver_reads_them() -> None:
    kinds = "ppifllip"
    arguments = ArgumentBuffer(Kernel("norm", "norm", kinds))
    tensor = torch.zeros(4)
    parameter = torch.nn.Parameter(tensor)
    arguments.fill([None] * 2 + [0] * 5 + [None])
    assert read_as_driver(arguments, kinds) == [0] * 8
    arguments.fill([tensor, None, -7, 0.5, -(2**40), 2**62, 2**31 - 1, parameter])
    address = tensor.data_ptr()
    assert read_as_driver(arguments, kinds) == [address, 0, -7, 0.5, -(2**40), 2**62, 2**31 - 1, address]


def test_kernel_without_parameters() -> None:
    ArgumentBuffer(Kernel("norm", "norm", "")).fill([])


@pytest.mark.parametrize(
    ("kinds", "values", "error"),
    [
        ("i", [2**31], struct.error),
        ("l", [2**63], struct.error),
        ("i", [0.5], struct.error),
        ("ii", [1], ValueError),
        ("i", [1, 2], ValueError),
        ("i", [torch.zeros(1)], TypeError),
    ],
)
def test_invalid_arguments_are_rejected(kinds: str, values: list[Argument], error: type[Exception]) -> None:
    with pytest.raises(error):
        ArgumentBuffer(Kernel("norm", "norm", kinds)).fill(values)


def test_unknown_parameter_kind_is_rejected() -> None:
    with pytest.raises(LaunchError, match="kinds 'x'"):
        ArgumentBuffer(Kernel("norm", "norm", "x"))
