"""The compiled library and Python: check of equal sources, and checks of arguments."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.executor.kernels.compiled_checks import INCLUDES

from quintet.executor.backends.cpu.ops import host_library
from quintet.executor.backends.cpu.ops.host_attention import CAttention
from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES
from quintet.executor.backends.cpu.ops.host_library import SOURCES, check_layout, check_library, open_library
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.step import CRotation, CStep, KvPlace
from quintet.executor.sampling.settings import RECORD
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

FP8 = DTYPE_CODES[torch.float8_e4m3fn]
SCALES = {"ones": (ctypes.c_float * 2)(1.0, 1.0), "with zero": (ctypes.c_float * 2)(1.0, 0.0)}

SMALL_STACK = """
import threading
import torch
from quintet.executor.backends.cpu.ops.host_attention import CAttention
from quintet.executor.backends.cpu.ops.host_library import open_library
from tests.executor.kernels.compiled_checks import INCLUDES
from tests.executor.kernels.paged_requests import Requests, Shape

for dtype, in_pairs in ((torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 1)):
    open_library().qt_attend_in_pairs(in_pairs)
    outputs = []
    world = Requests(Shape(dtype, heads=16, kv_heads=2, head_dim=256), [200])
    world.fill()
    threading.stack_size(256 << 10)
    thread = threading.Thread(target=lambda: outputs.append(world.fill()))
    thread.start()
    thread.join()
    assert torch.isfinite(outputs[0][0]).all()
"""


def test_attention_runs_on_a_small_stack() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_headers_can_be_included_together(tmp_path: Path) -> None:
    """Headers must not define a name twice in different ways: the linker would take either."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    everything = tmp_path / "everything.cpp"
    headers = sorted(path.name for path in SOURCES.rglob("*.hpp") if path.parent.parent == SOURCES)
    everything.write_text("".join(f'#include "{name}"\n' for name in headers))
    command = [compiler, "-std=c++20", "-fsyntax-only", "-DQT_ISA=baseline", *INCLUDES, str(everything)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


Q5_0 = "    {Codes::five, Scales::half, 32, 32},                         // Q5_0\n"
Q5_1 = "    {Codes::five, Scales::half_minimum, 32, 32},                 // Q5_1\n"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the sources that the library was built from."""
    return Path(shutil.copytree(SOURCES, tmp_path / "cpu"))


def test_a_library_without_an_instruction_set_of_this_processor_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_library, "SOURCES", Path("absent"))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(qt_isa_at=lambda i: None))
    with caplog.at_level(logging.WARNING, "quintet"):
        assert open_library.__wrapped__() is None
    assert "built on another processor" in caplog.text and "`make kernels`" in caplog.text


def test_a_library_of_the_same_sources_is_loaded(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quintet"):
        check_library(loaded(), sources, "_host.so")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("linear_calls.cpp", "index_t max_rows, int dtype, const", "int dtype, index_t max_rows, const"),
        (
            "attention.hpp",
            "const float *key_scales, *value_scales;",
            "const float *value_scales, *key_scales;",
        ),
        ("blocks.hpp", "index_t block_bytes;  //", "index_t group_bytes;  //"),
        ("program.hpp", "index_t num_rows;\n", "index_t num_rows, num_more;\n"),
        ("sampling.hpp", "double top_p; ", "float top_p, more; "),
        ("states.hpp", "index_t stride = 0;", "std::int32_t stride = 0;"),
        ("work.hpp", "fp16 = 1, fp32 = 2", "fp32 = 1, fp16 = 2"),
        ("work.hpp", "silu = 1, gelu_tanh = 2", "gelu_tanh = 1, silu = 2"),
        ("experts.hpp", "softmax = 0, sigmoid = 1", "sigmoid = 0, softmax = 1"),
        ("ranks.hpp", "progress = 0, chores = 1", "chores = 0, progress = 1"),
        ("program.hpp", "tokens = 0, outputs = 1", "outputs = 0, tokens = 1"),
        ("weight_formats.hpp", "code = 1, scale = 2", "scale = 1, code = 2"),
        ("weight_formats.hpp", Q5_0 + Q5_1, Q5_1 + Q5_0),
        ("pool.cpp", "int qt_threads()", "int qt_num_threads()"),
    ],
)
def test_a_library_with_another_interface_is_rejected(sources: Path, file: str, old: str, new: str) -> None:
    (path,) = sources.rglob(file)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(
        ConfigError, match=r"^_host.so was built from sources other than .*: rebuild with `make install`"
    ):
        check_library(loaded(), sources, "_host.so")


def test_a_library_without_a_source_digest_is_rejected(sources: Path) -> None:
    with pytest.raises(ConfigError, match="make install"):
        check_library(ctypes.CDLL(None), sources, "_host.so")


def test_older_kernels_with_the_same_interface_are_logged(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (sources / "kernels" / "attention" / "kv_write.cpp").open("a") as file:
        file.write("// faster now\n")
    with caplog.at_level(logging.WARNING, "quintet"):
        check_library(loaded(), sources, "_host.so")
    assert "make install" in caplog.text


def test_the_library_is_checked_when_opened(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    (sources / "runtime" / "work.hpp").write_text("")
    monkeypatch.setattr(host_library, "SOURCES", sources)
    with pytest.raises(ConfigError, match="make install"):
        open_library.__wrapped__()


@pytest.mark.parametrize(
    ("function", "size"),
    [
        ("qt_step_bytes", ctypes.sizeof(CStep)),
        ("qt_draw_settings_bytes", RECORD.itemsize),
        ("qt_attention_layer_bytes", ctypes.sizeof(CAttention)),
    ],
)
def test_a_struct_of_another_size_is_rejected(function: str, size: int) -> None:
    check_layout(loaded(), function, size)
    with pytest.raises(
        ConfigError,
        match=rf"{function} returns {size} bytes, but the Python struct has {size + 8}.*make install",
    ):
        check_layout(loaded(), function, size + 8)


def test_step_fields_have_the_same_order() -> None:
    assert fields_of("program.hpp", "Step") == [name for name, _ in CStep._fields_]
    assert fields_of("program.hpp", "Rotation") == [name for name, _ in CRotation._fields_]
    assert fields_of("attention.hpp", "AttentionLayer") == [name for name, _ in CAttention._fields_]
    assert fields_of("sampling.hpp", "DrawSettings") == list(RECORD.names or ())


def test_weight_formats_have_the_same_order() -> None:
    listed = re.findall(
        r"^    \{Codes::.*\},? +// (\w+)$", (SOURCES / "linear" / "weight_formats.hpp").read_text(), re.M
    )
    assert listed == [each.name for each in WeightFormat if not each.is_float]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rotary": 512}, "512 rotary dimensions from 0 on of 64"),
        ({"rotary": -2}, "-2 rotary dimensions from 0 on of 64"),
        ({"rotary": 33}, "33 rotary dimensions from 0 on of 64"),
        ({"rotary": 32, "rotary_first": 34}, "32 rotary dimensions from 34 on of 64"),
        ({"heads": 5}, "5 query heads share 2 KV heads"),
        ({"key_width": 577}, "2 heads of 577 and 64 numbers in blocks of 16"),
        ({"value_width": 513}, "2 heads of 64 and 513 numbers in blocks of 16"),
        ({"key_width": 0}, "2 heads of 0 and 64 numbers in blocks of 16"),
        ({"block_size": 24}, "in blocks of 24"),
        ({"window": 5, "chunk": 5}, "window 5, chunk 5"),
        ({"growth": 1.0, "period": 0}, "growth 1 by 0 positions"),
        ({"kv_dtype": 2}, "activations of format 0, a cache of 2"),
        ({"key_scales": "with zero"}, "scales of keys or values for a cache of format 0"),
        ({"value_scales": "with zero"}, "scales of keys or values for a cache of format 0"),
        ({"kv_dtype": FP8, "key_scales": "with zero"}, "scale 0 of keys or values of head 1"),
        (
            {"kv_dtype": FP8, "value_scales": "with zero"},
            "scale 0 of keys or values of head 1",
        ),
        ({"kv_dtype": FP8, "values_in_keys": 1, "key_scales": "ones"}, "scales of values at"),
    ],
)
@pytest.mark.parametrize("attends", [False, True])
def test_kernel_arguments_are_checked_when_recorded(
    small_process: ProcessPoolExecutor, changed: dict[str, float | str], words: str, attends: bool
) -> None:
    assert words in small_process.submit(stderr_of_abort, partial(record, changed, attends)).result()


@pytest.fixture(scope="module")
def small_process() -> Iterator[ProcessPoolExecutor]:
    """A process that can fork. One with more memory than is free, even unused KV of earlier tests, cannot."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def record(changed: dict[str, float | str], attends: bool) -> None:
    """Record a kernel with changed fields of its attention layer; a text names scales."""
    library, at, wide = program_library(), 64, 1 << 20
    assert library is not None
    program = library.new()
    shape = {"heads": 4, "kv_heads": 2, "key_width": 64, "value_width": 64, "block_size": 16, "period": 1}
    fields = {
        name: ctypes.addressof(SCALES[value]) if isinstance(value, str) else value
        for name, value in (shape | changed).items()
    }
    layer = ctypes.byref(CAttention(**fields))
    place = ctypes.byref(KvPlace(at, at, 0, 1, 0, 0))
    if attends:
        library.attention(program, layer, at, wide, place, at, wide, 8)
    else:
        library.rope_kv_write(program, layer, *(at, wide, at, wide, at, wide), place, at, wide)


def loaded() -> ctypes.CDLL:
    library = open_library()
    assert library is not None
    return library


def stderr_of_abort(act: Callable[[], None]) -> str:
    """Return the standard error of a child process that runs this and aborts."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        faulthandler.disable()
        act()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as words:
        output = words.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT, output
    return output


def fields_of(header: str, struct: str) -> list[str]:
    """Return the field names of a struct, in order."""
    (path,) = SOURCES.rglob(header)
    found = re.search(rf"^struct {struct} {{\n(.*?)^}};", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    declared = re.findall(r"^ +(?:const )?[\w:]+ ?(\**[\w][\w, *]*|[\w, *]+);", found[1], re.MULTILINE)
    return [name.strip(" *") for names in declared for name in names.split(",")]
