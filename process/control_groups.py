"""Control groups (cgroups) of this process: folders of the kernel with limits of memory and CPU time.

A limit of a group applies to all groups below it. systemd, Slurm and Docker set limits on a group that is not the root.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

SYSTEM = Path("/sys")
"""Mount point of sysfs; ``proc`` is in the same folder."""


def group_folders(controller: str, system: Path = SYSTEM) -> tuple[list[Path], list[Path]]:
    """Return the folders of this process's group and its ancestors: of version 2, and of a controller of version 1.

    The last folder of each is the mount point: in a container, often the container's own group. Folders may be missing.
    """
    root = system / "fs/cgroup"
    unified, version_1 = [root], [root / controller]
    try:
        lines = (system.parent / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return unified, version_1
    for line in lines:
        _, _, entry = line.partition(":")
        names, _, group = entry.partition(":")
        if not names:
            unified = _with_ancestors(root, group)
        elif controller in names.split(","):
            version_1 = _with_ancestors(root / controller, group)
    return unified, version_1


def _with_ancestors(mount: Path, group: str) -> list[Path]:
    parts = PurePosixPath(group).parts[1:]
    if ".." in parts:  # a group outside of the mounted namespace
        return [mount]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
