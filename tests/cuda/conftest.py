"""The device of tests/cuda: emulated. tests/gpu collects the same tests with a real one."""

from __future__ import annotations

import os

import pytest
from tests.cuda.emulated import EmulatedDevice

from quintet.executor.cuda.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    """Kernels on the CPU; ``QUINTET_EMULATION_SEED`` runs their threads in another order."""
    return EmulatedDevice(seed=int(os.environ.get("QUINTET_EMULATION_SEED", "1")))
