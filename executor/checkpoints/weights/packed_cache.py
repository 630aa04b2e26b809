"""Packed-weight cache: a file that later starts map instead of packing again; servers share its pages.

    magic, version | length of the header | header (JSON) | section | section | ...       sections are page-aligned

The header identifies the checkpoint (size, time and header hash of every file), quantization, number format and
sections. It is compared byte for byte, not interpreted; a file with another header or length is rewritten. Sections
are not hashed, since reading them all would cost the time that the cache saves. A file is renamed into place when it
is complete and on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from quintet.executor.checkpoints.weights.files import packed_file
from quintet.executor.checkpoints.weights.mapped import WeightFile, read_only_tensor
from quintet.executor.checkpoints.weights.store import PackedStore, offsets

log = logging.getLogger(__name__)

MAGIC = b"quintet packed weights\n\0"
VERSION = 1
"""Version of the file layout. Descriptions version the content of sections."""
PREFIX = struct.Struct("<24sQQ")


class PackedCache:
    """Cache file of one model in one quantization."""

    def __init__(
        self, folder: Path, model: Path, quantization: str, dtype: str, rank_label: str = ""
    ) -> None:
        self._folder = folder
        self._quantization = quantization
        self._dtype = dtype
        self.path = packed_file(folder, model, quantization, dtype, rank_label)

    def open(self, files: Sequence[WeightFile], stores: Sequence[PackedStore]) -> bool:
        """Open every store on the file's pages. Return False, with the reason in the log, if no usable file exists."""
        head = self._head(files, stores)
        begins, end = offsets(stores, len(head))
        try:
            with self.path.open("rb") as file:
                reason = _difference(file.read(len(head)), head, os.fstat(file.fileno()).st_size, end)
                if reason:
                    log.info("packed cache %s not used: %s; packing again", self.path, reason)
                    return False
                mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.info("packed cache %s unreadable (%s); packing again", self.path, error)
            return False
        mapped.madvise(mmap.MADV_WILLNEED)
        memory = read_only_tensor(mapped, torch.uint8, end)
        for store, begin in zip(stores, begins, strict=True):
            store.open(memory[begin : begin + store.num_bytes])
        return True

    def write(self, files: Sequence[WeightFile], stores: Sequence[PackedStore], memory: torch.Tensor) -> bool:
        """Write the file from ``memory``, the reservation of the stores.

        Returns False, with a log line, for an unwritable folder or a full disk.
        """
        start = time.monotonic()
        head = self._head(files, stores)
        begins, _ = offsets(stores, len(head))
        temporary = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".writing-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(head)
                file.write(bytes(begins[0] - len(head)))
                file.write(memory.numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            log.warning("packed cache not written to %s: %s", self.path, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        took_s = time.monotonic() - start
        log.info("packed cache written to %s: %.0f MB in %.1f s", self.path, memory.numel() / 1e6, took_s)
        return True

    def _head(self, files: Sequence[WeightFile], stores: Sequence[PackedStore]) -> bytes:
        """Return the required beginning of a usable file, in canonical form."""
        content = {
            "checkpoint": [
                [file.path.name, file.size, file.modified_ns, hashlib.sha256(file.header).hexdigest()]
                for file in files
            ],
            "quantization": self._quantization,
            "dtype": self._dtype,
            "sections": [{**store.description, "bytes": store.num_bytes} for store in stores],
        }
        header = json.dumps(content, sort_keys=True).encode()
        return PREFIX.pack(MAGIC, VERSION, len(header)) + header


def _difference(found: bytes, wanted: bytes, found_bytes: int, wanted_bytes: int) -> str:
    """Return the reason why a file cannot be used; empty if it can."""
    if not found.startswith(MAGIC) or len(found) < PREFIX.size:
        return "not a packed-cache file"
    if found[: PREFIX.size - 8] != wanted[: PREFIX.size - 8]:
        return "written by another version"
    if found != wanted:
        return "another checkpoint or another packing"
    if found_bytes != wanted_bytes:
        return f"{found_bytes} of {wanted_bytes} bytes"
    return ""
