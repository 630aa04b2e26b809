"""The first process of each role, forked off before anything is known of the model.

    supervisor ─ flags ─ port ─┬─ fork, five times ─┬─ model card, sizes ─ configuration ─ sockets ─ slots ─▶
                               │                    │
                               ├─▶ executor: imports torch ......................... configuration, weights ─▶ ready
                               ╰─▶ the others: import what is theirs ............. configuration, vocabulary ─▶ ready

A fork has the interpreter and what every process imports, where a new interpreter needs a sixth of a second of processor time
for them, and shares their memory. Forking is safe only while there is one thread and no ZeroMQ context, that is before the
supervisor has its sockets: whoever is needed later is a program of its own (`quintet.deploy.supervisor.spawn`).

A child gets its slot as a spare does: by a line at its standard input.

Where there are fewer cores than processes, all but the executor keep off one of them until they have what their work
needs: shares being equal, the executor would otherwise import torch on a third of a core while everybody waits for it.
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

from quintet.deploy.supervisor.spawn import LISTEN_FD, MODULES, assign_slot
from quintet.process.runtime import (
    die_with_parent,  # with it, before any fork, comes what every child imports
)
from quintet.wire.ids import Role, WorkerId


def roles_to_fork(has_real_executor: bool, has_frontends: bool) -> list[Role]:
    """Return the roles whose first process is forked: the one that takes longest first, and no mock of it."""
    first = [Role.EXECUTOR] if has_real_executor else []
    last = [Role.FRONTEND] if has_frontends else []
    return [*first, Role.TOKENIZER, Role.DETOKENIZER, *last, Role.CORE]


class ForkedProcess:
    """A child of this process. What `subprocess.Popen` is for one that was started as a program."""

    def __init__(self, pid: int, slot_pipe: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(slot_pipe, "wb", buffering=0)
        self._exit_status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status if it ended, or minus the signal that ended it."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Return the exit status once it ended."""
        status = self._reap(0)
        assert status is not None, self.pid
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended: its id may be another's then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self._exit_status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except (
                ChildProcessError
            ):  # who started us ignores SIGCHLD: the system has reaped it, its status is lost
                pid, status = self.pid, 0
            if pid == self.pid:
                self._exit_status = os.waitstatus_to_exitcode(status)
        return self._exit_status


class Prefork:
    """Children that wait for their slots. Belongs to the main thread: children die with the thread that made them."""

    def __init__(
        self, run_dir: Path, listener: socket.socket | None, modules: Mapping[Role, str] = MODULES
    ) -> None:
        self._run_dir = run_dir
        self._listener = listener
        self._modules = modules
        self._waiting: dict[Role, ForkedProcess] = {}

    def fork(self, roles: Sequence[Role]) -> None:
        """Fork a process of each role, in this order; none where the system cannot, or where it would not be safe."""
        if not _is_safe():
            return
        gc.freeze()  # the children's collectors leave the shared pages alone
        for role in roles:
            try:
                self._waiting[role] = self._fork(role)
            except OSError:  # no process or descriptor to be had: the rest are started as programs
                return

    def take(self, worker: WorkerId) -> ForkedProcess | None:
        """Slot the child of this role that still waits, if there is one."""
        process = self._waiting.pop(worker.role, None)
        return process if process is not None and assign_slot(process, worker) else None

    def end(self) -> None:
        """Kill those that got no slot."""
        for process in self._waiting.values():
            process.kill()
        for process in self._waiting.values():
            process.wait()
            process.stdin.close()
        self._waiting.clear()

    def _fork(self, role: Role) -> ForkedProcess:
        slot_read, slot_write = os.pipe()
        parent = os.getpid()
        _flush()  # or the child would write what is buffered once more
        try:
            pid = os.fork()
        except OSError:
            os.close(slot_read)
            os.close(slot_write)
            raise
        if pid == 0:
            self._be(role, slot_read, slot_write, parent)
        os.close(slot_read)
        return ForkedProcess(pid, slot_write)

    def _be(self, role: Role, slot_read: int, slot_write: int, parent: int) -> NoReturn:
        """In a child: be what ``python -P -m module …`` would be, in a process group of its own. Does not return."""
        status = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            os.close(slot_write)
            for elder in self._waiting.values():
                elder.stdin.close()
            self._keep_listener(role)
            cores = [] if role is Role.EXECUTOR else _leave_a_core(len(MODULES))
            gc.disable()  # until `child_main` has what it needs: what is made meanwhile stays
            words = ["--run-dir", str(self._run_dir), "--parent", str(parent), "--early", *cores]
            _run_module(self._modules[role], slot_read, words)
            status = 0
        except SystemExit as ending:
            status = _status_of(ending)
        except BaseException:  # noqa: BLE001 - the last stop: say why, then end
            traceback.print_exc()
        finally:
            logging.shutdown()
            _flush()
            os._exit(status)  # what the supervisor does when it ends is not for its children to do

    def _keep_listener(self, role: Role) -> None:
        """In a child: the listening socket is the frontend's."""
        if self._listener is None:
            return
        if role is Role.FRONTEND:
            os.environ[LISTEN_FD] = str(self._listener.fileno())
        else:
            self._listener.close()


def _is_safe() -> bool:
    """Whether this process can fork and go on in the child: it has one thread, and the system counts them."""
    try:
        return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _leave_a_core(num_processes: int) -> list[str]:
    """Keep off one core; return the words that tell `child_main` which to use in the end, none where all may be used."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 < len(cores) < num_processes:
        return []
    try:
        os.sched_setaffinity(0, cores[1:])
    except OSError:  # a sandbox that does not allow it
        return []
    return ["--cores", ",".join(map(str, cores))]


def _run_module(module: str, standard_input: int, words: Sequence[str]) -> None:
    if standard_input != 0:
        os.dup2(standard_input, 0)
        os.close(standard_input)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # as -P has it: a file of the working directory is no module of ours
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()


def _status_of(ending: SystemExit) -> int:
    """Return the exit status that the interpreter would end with."""
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1
