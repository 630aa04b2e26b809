"""``make cubins``: compiled targets, skipped targets, and messages. Most tests use a fake compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.executor.backends.cuda.kernels.compile import (
    Compilation,
    KernelUsage,
    compile_all,
    is_current,
    main,
    prune,
    run,
    table,
    usages,
    warnings,
)
from quintet.executor.backends.cuda.kernels.compilers import (
    CompileError,
    MissingCompilerError,
    Nvrtc,
    Output,
    find_nvrtc,
)
from quintet.executor.backends.cuda.kernels.modules import digest

NVCC_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'norm_fp16' for 'sm_90'
ptxas info    : Function properties for norm_fp16
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes stack, 32 bytes smem
ptxas info    : Compiling entry function 'norm_bf16' for 'sm_90'
ptxas info    : Function properties for norm_bf16
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 15 registers
"""


class FakeCompiler:
    """Records its calls; a text with ``mistake`` in it does not compile."""

    def __init__(self, version: str = "fake 1") -> None:
        self.version = version
        self.requested: list[tuple[str, int]] = []

    def compile(self, module: str, text: str, target: int) -> Output:
        self.requested.append((module, target))
        if "mistake" in text:
            raise CompileError("norm.cu(3): error: a mistake")
        return Output(b"code", b"ptx", NVCC_LOG)


def jobs(folder: Path, compiler: FakeCompiler, text: str = "text", keeps: bool = True) -> list[Compilation]:
    return [Compilation("norm", text, target, compiler, folder, keeps) for target in (80, 90)]


def test_output_is_kept_with_a_record_of_its_sources(tmp_path: Path) -> None:
    assert compile_all(jobs(tmp_path, FakeCompiler()), 2) == []
    assert (tmp_path / "sm_90/norm.cubin").read_bytes() == b"code"
    assert (tmp_path / "ptx/norm.ptx").read_bytes() == b"ptx"
    for name in ("sm_80/norm.txt", "sm_90/norm.txt", "ptx/norm.txt"):
        assert (tmp_path / name).read_text().startswith(f"{digest('text')}\nfake 1\n")


def test_only_the_record_of_the_second_compiler_is_kept(tmp_path: Path) -> None:
    compile_all(jobs(tmp_path, FakeCompiler(), keeps=False), 1)
    assert sorted(path.name for path in tmp_path.rglob("norm.*")) == ["norm.txt", "norm.txt"]
    assert all(is_current(job) for job in jobs(tmp_path, FakeCompiler(), keeps=False))


def test_only_changed_sources_are_recompiled(tmp_path: Path) -> None:
    compile_all(jobs(tmp_path, FakeCompiler()), 1)
    same, other_text = FakeCompiler(), FakeCompiler()
    compile_all(jobs(tmp_path, same), 1)
    compile_all(jobs(tmp_path, other_text, "other text"), 1)
    assert (same.requested, len(other_text.requested)) == ([], 2)


def test_kernels_of_another_compiler_version_are_kept_by_default(tmp_path: Path) -> None:
    """Kernels carried to another machine match the version of its packages only by chance."""
    compile_all(jobs(tmp_path, FakeCompiler()), 1)
    kept, requested = FakeCompiler("fake 2"), FakeCompiler("fake 2")
    compile_all(jobs(tmp_path, kept), 1)
    compile_all(jobs(tmp_path, requested), 1, again=True)
    assert (kept.requested, len(requested.requested)) == ([], 2)


def test_missing_output_is_recompiled(tmp_path: Path) -> None:
    compile_all(jobs(tmp_path, FakeCompiler()), 1)
    (tmp_path / "ptx/norm.ptx").unlink()
    again = FakeCompiler()
    compile_all(jobs(tmp_path, again), 1)
    assert again.requested == [("norm", 80)]


def test_compile_error_is_reported_and_leaves_no_current_output(
    tmp_path: Path,
) -> None:
    compile_all(jobs(tmp_path, FakeCompiler()), 1)
    wrong = jobs(tmp_path, FakeCompiler(), "a mistake")
    first, second = sorted(compile_all(wrong, 2))
    assert first.startswith("norm.cu for sm_80 with fake 1:\nnorm.cu(3): error") and "sm_90" in second
    assert not any(is_current(job) for job in wrong)


def test_unknown_module_error_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["norm", "nosuch"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "unknown module nosuch; allowed are activation, all_reduce," in error


def test_outputs_of_removed_modules_are_deleted(tmp_path: Path) -> None:
    compile_all(jobs(tmp_path, FakeCompiler()), 1)
    prune(tmp_path, ["norm"])
    assert (tmp_path / "sm_90/norm.cubin").exists()
    prune(tmp_path, ["rope"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_assembler_report_is_parsed() -> None:
    assert list(usages(NVCC_LOG)) == [
        KernelUsage("norm_fp16", 255, 12, 32),
        KernelUsage("norm_bf16", 15, 0, 0),
    ]
    lines = list(table({("norm", 90): NVCC_LOG}))
    assert [line.split() for line in lines[1:]] == [
        ["norm:", "norm_bf16", "-", "15", "0", "-"],
        ["norm:", "norm_fp16", "-", "255", "32", "-"],
    ]
    assert list(warnings({("norm", 90): NVCC_LOG, ("rope", 80): "rope.cu(2): warning #177-D: unused"})) == [
        "rope.cu(2): warning #177-D: unused",
        "warning: norm: norm_fp16 spills 12 bytes a thread on sm_90",
    ]


KERNEL = """\
#line 7 "scale.cuh"
extern "C" __global__ void __launch_bounds__(64) scale(float* x, float factor) { x[threadIdx.x] *= factor WRONG; }
"""


def nvrtc(*, quick: bool = False) -> Nvrtc:
    try:
        return find_nvrtc(quick=quick)
    except MissingCompilerError:
        pytest.skip("no NVRTC: `make cubins` installs it")


def test_nvrtc_compiles_and_reports() -> None:
    output = nvrtc().compile("scale", KERNEL.replace("WRONG", ""), 90)
    assert output.cubin.startswith(b"\x7fELF")
    assert output.ptx is not None and b".entry scale(" in output.ptx
    assert [usage.kernel for usage in usages(output.log)] == ["scale"]


@pytest.mark.parametrize("quick", [False, True])
def test_nvrtc_errors_name_the_line(quick: bool) -> None:
    with pytest.raises(CompileError, match=r"scale\.cuh\(7\): error"):
        nvrtc(quick=quick).compile("scale", KERNEL, 90)


def test_quick_output_does_not_replace_kept_output(tmp_path: Path) -> None:
    """The check compiles into its own folder, and its output is not kept."""
    text = KERNEL.replace("WRONG", "")
    run(Compilation("scale", text, 90, nvrtc(quick=True), tmp_path / "checked", False))
    assert not is_current(Compilation("scale", text, 90, nvrtc(), tmp_path, True))
    assert not list(tmp_path.rglob("*.cubin"))
