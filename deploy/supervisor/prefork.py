"""Prefork: fork the first process of each role before the model is read, so that imports overlap with it.

    supervisor ─ flags ─ port ─┬─ fork, five times ─┬─ model config, sizes ─ configuration ─ sockets ─ slots ─▶
                               │                    │
                               ├─▶ executor: imports torch ......................... configuration, weights ─▶ ready
                               ╰─▶ the others: import their modules .............. configuration, vocabulary ─▶ ready

A fork shares the interpreter and the common imports; a new interpreter spends 0.17 s of processor time on them.
Forking is safe only with one thread and no ZeroMQ context, that is before the supervisor opens its sockets. Processes
started later are new programs (`quintet.deploy.supervisor.spawn`).

A child gets its slot like a standby process: by a line on its standard input.

With fewer cores than processes, all but the executor leave one core free until their imports are done. Otherwise the
executor would import torch on a third of a core while the other processes wait for it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from quintet.deploy.supervisor.spawn import LISTEN_FD, MODULES, assign_slot, end_processes
from quintet.process.child import die_with_parent  # also imports the children's common modules
from quintet.wire.ids import Role, WorkerId


def roles_to_fork(has_real_executor: bool, has_frontends: bool) -> list[Role]:
    """Return the roles to fork, slowest boot first. A mock executor is not forked."""
    first = [Role.EXECUTOR] if has_real_executor else []
    last = [Role.FRONTEND] if has_frontends else []
    return [*first, Role.TOKENIZER, Role.DETOKENIZER, *last, Role.CORE]


class ForkedProcess:
    """A forked child, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, slot_pipe: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(slot_pipe, "wb", buffering=0)
        self._exit_status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or the negated signal number; None while the child runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the exit and return the exit status."""
        status = self._reap(0)
        assert status is not None, self.pid
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the child has exited: its process id may be reused then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self._exit_status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except (
                ChildProcessError
            ):  # SIGCHLD was ignored at start: the kernel reaped it, the status is lost
                pid, status = self.pid, 0
            if pid == self.pid:
                self._exit_status = os.waitstatus_to_exitcode(status)
        return self._exit_status


class Prefork:
    """Forked children that wait for slots. Use from the main thread: children die with the thread that forked them."""

    def __init__(
        self, run_dir: Path, listener: socket.socket | None, modules: Mapping[Role, str] = MODULES
    ) -> None:
        self._run_dir = run_dir
        self._listener = listener
        self._modules = modules
        self._waiting: dict[Role, ForkedProcess] = {}

    def fork(self, roles: Sequence[Role]) -> None:
        """Fork a process per role, in this order. Forks none if forking is unsafe or the system refuses."""
        if not _is_safe():
            return
        gc.freeze()  # the children's garbage collectors do not write to shared pages
        for role in roles:
            try:
                self._waiting[role] = self._fork(role)
            except OSError:  # out of processes or descriptors: the rest are started as programs
                return

    def take(self, worker: WorkerId) -> ForkedProcess | None:
        """Assign ``worker``'s slot to the waiting child of its role and return it; None without one."""
        process = self._waiting.pop(worker.role, None)
        return process if process is not None and assign_slot(process, worker) else None

    def end(self) -> None:
        """Kill the children without a slot."""
        end_processes(self._waiting.values())
        self._waiting.clear()

    def _fork(self, role: Role) -> ForkedProcess:
        slot_read, slot_write = os.pipe()
        parent = os.getpid()
        _flush()  # otherwise the child writes the buffered output a second time
        try:
            pid = os.fork()
        except OSError:
            os.close(slot_read)
            os.close(slot_write)
            raise
        if pid == 0:
            self._run_child(role, slot_read, slot_write, parent)
        os.close(slot_read)
        return ForkedProcess(pid, slot_write)

    def _run_child(self, role: Role, slot_read: int, slot_write: int, parent: int) -> NoReturn:
        """Run ``python -P -m module …`` in the child, in a new process group. Does not return."""
        status = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            os.close(slot_write)
            for earlier in self._waiting.values():
                earlier.stdin.close()
            self._keep_listener(role)
            cores = [] if role is Role.EXECUTOR else _free_core(len(MODULES))
            gc.disable()  # until `child_main` has imported its modules: none of these objects is garbage
            arguments = ["--run-dir", str(self._run_dir), "--parent", str(parent), "--early", *cores]
            _run_module(self._modules[role], slot_read, arguments)
            status = 0
        except SystemExit as ending:
            status = _status_of(ending)
        except BaseException:  # noqa: BLE001 - print the traceback, then exit
            traceback.print_exc()
        finally:
            logging.shutdown()
            _flush()
            os._exit(status)  # skips the supervisor's exit handlers

    def _keep_listener(self, role: Role) -> None:
        """Pass the listening socket to a frontend child; close it in other children."""
        if self._listener is None:
            return
        if role is Role.FRONTEND:
            os.environ[LISTEN_FD] = str(self._listener.fileno())
        else:
            self._listener.close()


def _is_safe() -> bool:
    """Return whether forking is safe: on Linux, with exactly one thread."""
    try:
        return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _free_core(num_processes: int) -> list[str]:
    """Leave one core free; return the arguments with which `child_main` restores the cores, empty if unchanged."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 < len(cores) < num_processes:
        return []
    try:
        os.sched_setaffinity(0, cores[1:])
    except OSError:  # forbidden in some sandboxes
        return []
    return ["--cores", ",".join(map(str, cores))]


def _run_module(module: str, standard_input: int, arguments: Sequence[str]) -> None:
    if standard_input != 0:
        os.dup2(standard_input, 0)
        os.close(standard_input)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process exits
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # like -P: do not import from the working directory
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            stream.flush()


def _status_of(ending: SystemExit) -> int:
    """Return the interpreter's exit status for ``ending``."""
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1
