"""Which form of a kernel a device gets, and how a launch's arguments are packed: all that needs no device."""

from __future__ import annotations

import ctypes
import logging
import struct
from pathlib import Path

import pytest
import torch

from quintet.executor.backends.cuda.device import Argument, Kernel, LaunchError
from quintet.executor.backends.cuda.kernels.arguments import ArgumentBuffer
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
def house(tmp_path: Path) -> House:
    return House(tmp_path)


class House:
    """A folder of sources with one module, and what was compiled of it."""

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
    """Loads whatever is not refused, and remembers what it was asked for."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.asked: list[str] = []
        self.kernels: list[str | None] = []

    def load(self, path: Path, kernel: str | None) -> str:
        self.kernels.append(kernel)
        return self._take(path.parent.name)

    def compile(self, text: str) -> str:
        return self._take("source")

    def _take(self, what: str) -> str:
        self.asked.append(what)
        if what in self.refused:
            raise RefusedError(f"no {what} today")
        return what


def test_a_modules_text_has_each_header_once_and_says_which_line_is_whose(house: House) -> None:
    house.write("norm.cu", '#include "device.cuh"\n#include "numbers.cuh"\nnorm')
    assert house.text().splitlines() == [
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


def test_a_changed_header_changes_the_digest(house: House) -> None:
    before = digest(house.text())
    house.write("numbers.cuh", "#pragma once\nother numbers\n")
    assert digest(house.text()) != before


def test_every_module_of_the_checkout_has_a_text() -> None:
    assert modules()
    assert all("QT_KERNEL" in source_text(module) for module in modules())


def test_machine_code_runs_on_its_major_capability_from_its_minor_on(house: House) -> None:
    house.compile(
        "sm_80/norm.cubin", "sm_89/norm.cubin", "sm_90/norm.cubin", "sm_100/norm.cubin", "ptx/norm.ptx"
    )
    assert house.forms(9, 0) == ["sm_90", "ptx", "sources"]
    assert house.forms(8, 6) == ["sm_80", "ptx", "sources"]
    assert house.forms(8, 9) == ["sm_89", "sm_80", "ptx", "sources"]
    assert house.forms(10, 3) == ["sm_100", "ptx", "sources"]
    assert house.forms(12, 0) == ["ptx", "sources"]


def test_what_was_compiled_of_other_sources_is_left_alone(house: House) -> None:
    house.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    house.write("numbers.cuh", "other numbers")
    house.compile("ptx/norm.ptx")
    found, missing = forms("norm", (9, 0), house.built, house.sources)
    assert [form.kind for form in found] == ["ptx", "source"]
    assert missing == ["sm_90/norm.cubin was compiled from other sources"]


def test_what_does_not_say_of_what_it_was_compiled_is_left_alone(house: House) -> None:
    house.compile("sm_90/norm.cubin")
    record_path(house.built / "sm_90/norm.cubin").unlink()
    assert house.forms(9, 0) == ["sources"]


def test_without_sources_what_was_compiled_is_believed(house: House) -> None:
    house.compile("sm_90/norm.cubin")
    (house.sources / "norm.cu").unlink()
    assert house.forms(9, 0) == ["sm_90"]


def test_the_next_form_is_tried_when_the_driver_refuses_one(house: House) -> None:
    house.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    for refused, taken in (((), "sm_90"), (("sm_90",), "ptx"), (("sm_90", "ptx"), "source")):
        assert house.store(Loader(*refused)).get("norm") == taken


def test_a_module_is_loaded_once(house: House) -> None:
    loader = Loader()
    store = house.store(loader)
    assert store.get("norm") == store.get("norm")
    assert loader.asked == ["source"]


def test_a_kernel_is_named_so_that_a_refusal_is_noticed_at_once(house: House) -> None:
    house.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    record = record_path(house.built / "ptx/norm.ptx")
    record.write_text(record.read_text().partition("ptxas")[0])
    loader = Loader("sm_90")
    house.store(loader).get("norm")
    assert loader.kernels == ["k", None]


def test_only_forms_of_the_given_kinds_are_used(house: House) -> None:
    house.compile("sm_90/norm.cubin", "ptx/norm.ptx")
    assert house.store(Loader(), ("ptx",)).get("norm") == "ptx"


def test_when_no_form_can_be_used_the_error_says_why_of_each(house: House) -> None:
    house.compile("ptx/norm.ptx")
    with pytest.raises(ConfigError) as caught:
        house.store(Loader("ptx", "source")).get("norm")
    for words in (
        "norm.cu",
        "sm_90/norm.cubin does not exist",
        "no ptx today",
        "no source today",
        "make cubins",
    ):
        assert words in str(caught.value)


def test_the_way_taken_is_said_once_and_with_its_reason(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.write("rope.cu", "rope")
    house.compile("ptx/norm.ptx")
    (house.built / "ptx/rope.ptx").write_bytes(b"code")
    record_path(house.built / "ptx/rope.ptx").write_text(digest(source_text("rope", house.sources)))
    store = house.store(Loader())
    with caplog.at_level(logging.INFO, "quintet"):
        store.get("norm")
        store.get("rope")
    (line,) = caplog.messages
    assert "PTX" in line and "9.0" in line and "sm_90/norm.cubin does not exist" in line


def as_the_driver_reads(arguments: ArgumentBuffer, kinds: str) -> list[int | float]:
    """Follow the addresses, and read of each parameter what the kernel's signature says."""
    types = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(arguments.address)
    return [types[kind].from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]


def test_arguments_are_where_the_driver_reads_them() -> None:
    kinds = "ppifllip"
    arguments = ArgumentBuffer(Kernel("norm", "norm", kinds))
    tensor = torch.zeros(4)
    parameter = torch.nn.Parameter(tensor)
    arguments.fill([None] * 2 + [0] * 5 + [None])
    assert as_the_driver_reads(arguments, kinds) == [0] * 8
    arguments.fill([tensor, None, -7, 0.5, -(2**40), 2**62, 2**31 - 1, parameter])
    address = tensor.data_ptr()
    assert as_the_driver_reads(arguments, kinds) == [address, 0, -7, 0.5, -(2**40), 2**62, 2**31 - 1, address]


def test_a_kernel_may_take_nothing() -> None:
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
def test_arguments_that_do_not_fit_are_refused(
    kinds: str, values: list[Argument], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ArgumentBuffer(Kernel("norm", "norm", kinds)).fill(values)


def test_a_kind_nobody_knows_is_refused() -> None:
    with pytest.raises(LaunchError, match="kinds 'x'"):
        ArgumentBuffer(Kernel("norm", "norm", "x"))
