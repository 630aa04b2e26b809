"""Runs a stage of the GPU session: groups of jobs, each with a time limit, under one deadline; keeps what they found.

    bash bench/gpu/remote.sh a 330 COMMIT      # what a person types; it installs wheels and starts this module
    python -m bench.gpu.stages a --seconds 330 --out DIR [--commit WORD] [--device cpu]

Jobs of a group run in parallel. A group may use all time that the groups after it do not need; a failed job ends nothing.
After each group ``DIR`` holds ``logs.tar.gz``, ``results.json`` and ``summary.txt``, so a machine that is taken away early
leaves what was found. The summary is printed last.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.check import exit_on_signal
from bench.gpu.child import run
from bench.gpu.machine import ROOT, environment
from bench.gpu.summary import JobResult, summarise, write_results

RESERVE_S = 15.0
"""Kept for packing and the summary."""
LEAST_S = 5.0
"""A job is not begun with less."""
ROW_END_S = 6.0
"""Before a job's limit the checklist ends its row, and records what it found."""
MOST_OF_PLANNED = 1.6
"""A group on a GPU may take so many times what is planned, where others have left it."""
FIRST_SHARE = 0.6
"""Share of a job's limit after which its fallback runs instead."""
MAX_CORE_BYTES = 8 << 20
"""A larger core dump is not packed."""
CORE_SUFFIX = ".cudacore"
MAX_FILE_BYTES = 16 << 20
"""Maximum size of a file that comes back."""
SMALL_LOG_BYTES = 2 << 20
"""Of a longer log, beginning and end are packed."""


@dataclass(frozen=True, slots=True)
class Job:
    """One process."""

    name: str
    command: tuple[str, ...]
    """Behind the interpreter. ``{logs}`` and ``{out}`` stand for the folders."""
    fallback: tuple[str, ...] = ()
    """Runs instead where the command failed and time is left."""


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs side by side."""

    jobs: tuple[Job, ...]
    seconds: float
    """Outputs of earlier groups that they need on a GPU."""
    toy_seconds: float
    """Likewise of toy shapes on two cores."""
    only_after_failure: bool = False


def _rows(*names: str) -> Job:
    """Return the job that runs rows of the checklist."""
    label = f"rows-{names[0]}"
    return Job(
        label,
        (
            *("bench/gpu/check.py", "--only", *names, "--again", "--commit", "{commit}"),
            *("--results", f"{{logs}}/{label}.json", "--logs", f"{{logs}}/{label}"),
            *("--seconds", "{seconds}"),
        ),
    )


def _module(name: str, module: str, *arguments: str, fallback: tuple[str, ...] = ()) -> Job:
    def command(label: str, *more: str) -> tuple[str, ...]:
        return ("-m", module, "--figures", f"{{logs}}/{label}.figures", *arguments, *more)

    return Job(name, command(name), command(f"{name}-fallback", *fallback) if fallback else ())


STAGES: dict[str, tuple[Group, ...]] = {
    "a": (
        Group((_module("smoke", "bench.gpu.smoke"),), 25, 25),
        Group(
            (
                _rows("kernels"),
                _rows("codes", "kinds"),
                _rows("models-fp32", "models-bf16"),
                _rows("steps", "invariance"),
            ),
            110,
            190,
        ),
        Group(
            (
                _module(
                    "profile",
                    *("bench.gpu.step_profile", "--trace", "{out}/trace.json.gz"),
                    fallback=("--batch-invariant",),
                ),
            ),
            85,
            25,
        ),
        Group((Job("diagnosis", ("-m", "bench.gpu.diagnosis", "{logs}")),), 50, 5, only_after_failure=True),
    ),
    "b": (
        Group((_module("steps", "bench.gpu.steps"),), 75, 25),
        Group((_module("kernel-rates", "bench.gpu.kernels", "--only", "attention", "linear"),), 45, 20),
        Group((_rows("processes"), _rows("memory")), 55, 60),
        Group((_rows("kill"),), 40, 45),
        Group((_module("http", "bench.gpu.serving", "--requests", "300"),), 115, 60),
        Group((_module("graphs-off", "bench.gpu.modes", "--mode", "graphs off"),), 20, 20),
    ),
}


@dataclass(slots=True)
class Session:
    """Folders, deadline and results of a stage."""

    device: str
    commit: str
    out: Path
    deadline: float
    results: list[JobResult] = field(default_factory=list)
    is_ending: threading.Event = field(default_factory=threading.Event)
    """Set by SIGTERM: running jobs are killed, no job begins."""

    @property
    def logs(self) -> Path:
        """Output of jobs, figures, core dumps. Not under ``out``: the archive of it is."""
        return ROOT / "build" / "gpu-logs"

    @property
    def has_failures(self) -> bool:
        """True if a job failed or ran out of time."""
        return any(result.status != 0 for result in self.results)

    def left_s(self) -> float:
        """Seconds until the deadline, without the reserve."""
        return self.deadline - time.monotonic() - RESERVE_S


def job_environment(logs: Path, num_parallel: int, dumps_core: bool) -> dict[str, str]:
    """Return the environment of a job: stacks of crashes, threads for its share of the cores, core dumps of kernels.

    dumps_core: without the memory's content, and without ending the process.
    """
    found = environment() | {
        "PYTHONFAULTHANDLER": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_DISABLE_ADDR2LINE": "1",  # looking up source lines takes a minute for each exception
    }
    if num_parallel > 1:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // num_parallel))
    if not dumps_core:
        return found
    return found | {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_shared_memory,skip_local_memory,skip_abort",
        "CUDA_COREDUMP_FILE": str(logs / "core.%p.cudacore"),
        "CUDA_COREDUMP_SHOW_PROGRESS": "0",
    }


def run_job(job: Job, session: Session, limit_s: float, num_parallel: int) -> JobResult:
    """Run a job, and its fallback if it failed. A killed process that does not vanish counts as out of time."""
    begun = time.monotonic()
    log = session.logs / f"{job.name}.log"
    names = {
        "logs": str(session.logs),
        "out": str(session.out),
        "commit": session.commit,
        "seconds": f"{max(LEAST_S, limit_s - ROW_END_S):.0f}",
    }
    variables = job_environment(
        session.logs, num_parallel, job.name == "smoke" or job.name.startswith("rows-")
    )

    def raise_if_ending() -> None:
        if session.is_ending.is_set():
            raise RuntimeError("the stage was ended")

    def attempt(command: tuple[str, ...], target: Path, share: float = 1.0) -> int | None:
        words = [part.format(**names) for part in command]
        if words[-1] != str(session.logs):
            words += ["--device", session.device]
        remaining = share * (limit_s - (time.monotonic() - begun))
        try:
            return run([sys.executable, *words], ROOT, variables, target, remaining, raise_if_ending).status
        except RuntimeError as error:
            print(f"  {job.name}: {error}", flush=True)
            return None

    status = attempt(job.command, log, FIRST_SHARE if job.fallback else 1.0)
    has_time = limit_s - (time.monotonic() - begun) > LEAST_S and not session.is_ending.is_set()
    used_fallback = bool(status != 0 and job.fallback and has_time)
    if used_fallback:
        status = attempt(job.fallback, session.logs / f"{job.name}-fallback.log")
    return JobResult(job.name, status, time.monotonic() - begun, used_fallback)


def run_group(group: Group, session: Session, kept_s: float) -> None:
    """Run the jobs of a group in parallel within what is left but ``kept_s``."""
    limit_s = session.left_s() - kept_s
    if session.device == "cuda":  # a job that hangs takes no more of what others left
        limit_s = min(limit_s, MOST_OF_PLANNED * group.seconds)
    names = ", ".join(job.name for job in group.jobs)
    if limit_s < LEAST_S:
        print(f"{names}: not begun, {limit_s:.0f} s are left", flush=True)
        session.results += [JobResult(job.name, None, 0.0, False) for job in group.jobs]
        return
    print(f"{names}: at most {limit_s:.0f} s", flush=True)
    with ThreadPoolExecutor(len(group.jobs)) as threads:
        try:
            done = list(threads.map(lambda job: run_job(job, session, limit_s, len(group.jobs)), group.jobs))
        except BaseException:
            session.is_ending.set()
            raise
    session.results += done
    for result in done:
        print(f"  {result.text()}", flush=True)


def run_stage(groups: Sequence[Group], session: Session) -> None:
    """Run the groups in order; pack logs and results behind each."""
    is_toy = session.device == "cpu"
    for at, group in enumerate(groups):
        if group.only_after_failure and not session.has_failures:
            continue
        later = [each for each in groups[at + 1 :] if session.has_failures or not each.only_after_failure]
        run_group(group, session, sum(each.toy_seconds if is_toy else each.seconds for each in later))
        pack(session)


def pack(session: Session) -> None:
    """Write logs, results and summary into ``out``; long logs are cut in the middle."""
    session.out.mkdir(parents=True, exist_ok=True)
    target = session.out / "logs.tar.gz"
    part = target.with_suffix(".part")
    files = [path for path in sorted(session.logs.rglob("*")) if path.is_file()]
    cores = [path for path in files if path.suffix == CORE_SUFFIX and path.stat().st_size <= MAX_CORE_BYTES]
    for kept in (cores[:1], []):
        with tarfile.open(part, "w:gz") as archive:
            for path in (*(path for path in files if path.suffix != CORE_SUFFIX), *kept):
                pack_file(archive, path, str(path.relative_to(session.logs)))
        if part.stat().st_size <= MAX_FILE_BYTES:
            break
    part.replace(target)
    for path in session.out.iterdir():
        if path.stat().st_size > MAX_FILE_BYTES:
            print(f"{path.name} is too large and was deleted: {path.stat().st_size} bytes", flush=True)
            path.unlink()
    write_results(session.logs, session.results, session.out / "results.json")
    (session.out / "summary.txt").write_text(summarise(session.logs, session.results))


def pack_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file; of a long log only its beginning and end."""
    content = path.read_bytes()
    if len(content) > SMALL_LOG_BYTES and path.suffix != CORE_SUFFIX:
        half = SMALL_LOG_BYTES // 2
        content = content[:half] + b"\n... cut ...\n" + content[-half:]
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write_facts(target: Path) -> None:
    """Write the facts of the machine and its packages."""
    commands = (
        ["nvidia-smi", "-q"],
        ["nvidia-smi", "topo", "-m"],
        [sys.executable, "-m", "pip", "list", "--format=freeze"],
        ["bash", "-c", "ulimit -a; nproc; free -g; df -h . /tmp; uname -a"],
    )
    with target.open("w") as file:
        for command in commands:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=5, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                file.write(f"{error}\n")


def main() -> int:
    """Parse the command line and run a stage; return 1 if a job failed."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    parser = command_parser(__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--seconds", type=float, required=True, help="limit of the whole call")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is to come back")
    parser.add_argument("--commit", default="unknown", help="what the results say")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on toys")
    parser.add_argument(
        "--elapsed", type=float, default=0.0, help="seconds of the limit that are spent already"
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds - arguments.elapsed
    session = Session(arguments.device, arguments.commit, arguments.out.resolve(), deadline)
    shutil.rmtree(session.logs, ignore_errors=True)
    session.logs.mkdir(parents=True)
    write_facts(session.logs / "facts.txt")
    os.chdir(ROOT)
    try:
        run_stage(STAGES[arguments.stage], session)
    finally:
        pack(session)
    print((session.out / "summary.txt").read_text(), flush=True)
    return int(session.has_failures)


if __name__ == "__main__":
    sys.exit(main())
