"""The device of tests/cuda: emulated. tests/gpu collects the same tests with a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cuda.emulated import EmulatedDevice

from quintet.executor.backends.cuda.device import Device

MANY = 100
"""Number of kernel tests in a session from which all files are compiled in advance instead of on first use."""


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """Kernels on the CPU; ``QUINTET_EMULATION_SEED`` runs their threads in another order."""
    emulated = EmulatedDevice(seed=int(os.environ.get("QUINTET_EMULATION_SEED", "1")))
    here = Path(__file__).parent
    if sum(here in item.path.parents for item in request.session.items) > MANY:
        emulated.compile_all()
    return emulated
