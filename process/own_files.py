"""Folders and files that a server keeps for itself: whose they must be before what is in them is believed, or written over."""

from __future__ import annotations

import errno
import os
import stat

ROOT = 0
"""Who may do anything anyway: volumes of containers are often made by it."""


def complaint_about(status: os.stat_result) -> str | None:
    """Return what is wrong with something that is to be this process's own; None if nothing is."""
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to user {status.st_uid}, and the server is user {os.geteuid()}: give it a folder of its own"
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return "is neither a folder nor a file: remove it"
    return None


def open_own(name: str, flags: int, folder: int | None = None) -> int:
    """Open or make a file (a folder with ``O_DIRECTORY``) that is this process's own, mode 0600; links are not followed.

    name: within ``folder``, a descriptor, where one is given. Raises `OSError` where it cannot be opened, `PermissionError`
    where it is another's.
    """
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.readlink(name, dir_fd=folder):
            raise PermissionError(0, "is a link, which is not followed here: remove it", name) from None
        raise
    complaint = complaint_about(os.fstat(file))
    if complaint is None:
        return file
    os.close(file)
    raise PermissionError(0, complaint, name)
