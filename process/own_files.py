"""Ownership checks on the server's own files and folders, before reading or overwriting them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

ROOT = 0
"""Accepted as an owner: container volumes are often created by root."""


def ownership_error(status: os.stat_result) -> str | None:
    """Return the reason why a file is not safely owned by this process; None if it is."""
    if status.st_uid not in (os.geteuid(), ROOT):
        return (
            f"belongs to user {status.st_uid}, but the server runs as user {os.geteuid()}: use another folder"
        )
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return "is neither a folder nor a file: remove it"
    return None


def open_own(name: str, flags: int, folder: int | None = None) -> int:
    """Open or create a file (a folder with ``O_DIRECTORY``) owned by this process, mode 0600; links are not followed.

    name: relative to ``folder``, a descriptor, if given. Does not wait for the other end of a pipe. Raises `OSError` if
    it cannot be opened, `PermissionError` if another user owns it, or it is of another kind.
    """
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.readlink(name, dir_fd=folder):
            raise PermissionError(0, "is a symbolic link, which is not followed: remove it", name) from None
        raise
    status = os.fstat(file)
    complaint = ownership_error(status)
    if complaint is None and stat.S_ISDIR(status.st_mode) and not flags & os.O_DIRECTORY:
        complaint = "is a folder, not a file: use another name"
    if complaint is None:
        return file
    os.close(file)
    raise PermissionError(0, complaint, name)


class OwnFolder:
    """An open folder of this process, and its files by relative name. Links are not followed."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` as `open_own`."""
        self.descriptor = open_own(str(path), os.O_RDONLY | os.O_DIRECTORY)

    def open(self, name: str, flags: int) -> int:
        """See `open_own`."""
        return open_own(name, flags, self.descriptor)

    def size_of(self, name: str) -> int | None:
        """Return the size of a file; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    def rename(self, name: str, other: str) -> None:
        """Rename a file, replacing one of the other name."""
        os.rename(name, other, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Close the folder; its open files stay open."""
        os.close(self.descriptor)
