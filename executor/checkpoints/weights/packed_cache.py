"""Packed weights kept in a file, so that the next start maps them instead of packing again, and servers share the pages.

    magic, version | length of the header | header (JSON) | section | section | ...       each section on a page of its own

The header says of which checkpoint (every file's size, time and header hash), for which quantization and number format the
sections are, and what each means. It is never interpreted: a file whose header is not, byte for byte, the one that would
be written now, or whose length is another, is written anew. The sections are not hashed: reading them all is what the
file is there to save. A file gets its name only when it is whole and on disk.
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

from quintet.executor.checkpoints.weights.file import WeightFile
from quintet.executor.checkpoints.weights.files import packed_file
from quintet.executor.checkpoints.weights.mapped import read_only_tensor
from quintet.executor.checkpoints.weights.store import PackedStore, offsets

log = logging.getLogger(__name__)

MAGIC = b"quintet packed weights\n\0"
VERSION = 1
"""Of this file's layout. What the sections hold is versioned by their descriptions."""
PREFIX = struct.Struct("<24sQQ")


class PackedCache:
    """The file of one model in one quantization."""

    def __init__(self, folder: Path, model: Path, quantization: str, dtype: str, whose: str = "") -> None:
        self._folder = folder
        self._quantization = quantization
        self._dtype = dtype
        self.path = packed_file(folder, model, quantization, dtype, whose)

    def open(self, files: Sequence[WeightFile], stores: Sequence[PackedStore]) -> bool:
        """Open every store on the file's pages. Return False, with the reason in the log, where there is no such file."""
        head = self._head(files, stores)
        begins, end = offsets(stores, len(head))
        try:
            with self.path.open("rb") as file:
                reason = _difference(file.read(len(head)), head, os.fstat(file.fileno()).st_size, end)
                if reason:
                    log.info("packed weights in %s are not used: %s; packing again", self.path, reason)
                    return False
                mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.info("packed weights in %s cannot be read (%s); packing again", self.path, error)
            return False
        mapped.madvise(mmap.MADV_WILLNEED)
        memory = read_only_tensor(mapped, torch.uint8, end)
        for store, begin in zip(stores, begins, strict=True):
            store.open(memory[begin : begin + store.num_bytes])
        return True

    def write(self, files: Sequence[WeightFile], stores: Sequence[PackedStore], memory: torch.Tensor) -> bool:
        """Write the file from ``memory``, the reservation that the stores are open in.

        A folder that cannot be written to, or a full disk, costs a line in the log; return whether it worked.
        """
        begun = time.monotonic()
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
            log.warning("packed weights cannot be kept in %s: %s", self.path, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        took_s = time.monotonic() - begun
        log.info("packed weights kept in %s: %.0f MB in %.1f s", self.path, memory.numel() / 1e6, took_s)
        return True

    def _head(self, files: Sequence[WeightFile], stores: Sequence[PackedStore]) -> bytes:
        """Return the beginning of a file that may be used: all that must agree, in one spelling."""
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
    """Say why a file cannot be used; nothing where it can."""
    if not found.startswith(MAGIC) or len(found) < PREFIX.size:
        return "it is no file of packed weights"
    if found[: PREFIX.size - 8] != wanted[: PREFIX.size - 8]:
        return "it was written by another version"
    if found != wanted:
        return "it is of another checkpoint, or was packed differently"
    if found_bytes != wanted_bytes:
        return f"it has {found_bytes} bytes of {wanted_bytes}"
    return ""
