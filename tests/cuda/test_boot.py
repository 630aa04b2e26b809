"""Boot of a device worker: the computation before KV memory is sized, and argument checks afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.gpu.host import HostOnlyDevice, open_worker
from bench.gpu.shapes import TOY

from quintet.executor.backends.cuda import boot
from quintet.executor.backends.cuda.runner import DeviceRunner


def test_kv_is_sized_while_the_largest_step_holds_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures of the measurements empty torch's cache, so the step is computed again after them."""
    done: list[str] = []
    step, sized = DeviceRunner.run_largest_step, boot.num_kv_blocks

    def record_step(self: DeviceRunner) -> None:
        done.append("largest step")
        step(self)

    def record_size(*arguments: Any) -> int:
        done.append("KV is sized")
        return sized(*arguments)

    def record_measure(self: object, layers: object, **more: object) -> None:
        done.append("measured")

    monkeypatch.setattr(DeviceRunner, "run_largest_step", record_step)
    monkeypatch.setattr(boot, "num_kv_blocks", record_size)
    monkeypatch.setattr(boot.DeviceLinears, "measure", record_measure)
    monkeypatch.setattr(boot, "is_gpu", lambda device: True)
    monkeypatch.setattr(boot, "_prompt_attention", lambda *arguments: None)
    open_worker(TOY, "cpu", tmp_path)
    assert done == ["largest step", "measured", "largest step", "KV is sized"]


def test_arguments_are_checked_until_boot_has_computed_the_largest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []
    step = DeviceRunner.run_largest_step

    def record_step(self: DeviceRunner) -> None:
        checked.append(self.device.checks_arguments)
        step(self)

    monkeypatch.setattr(DeviceRunner, "run_largest_step", record_step)
    monkeypatch.setattr(boot.DeviceLinears, "measure", lambda *arguments, **more: None)
    monkeypatch.setattr(boot, "_prompt_attention", lambda *arguments: None)
    monkeypatch.setattr(boot, "is_gpu", lambda device: True)
    _, device = open_worker(TOY, "cpu", tmp_path)
    assert isinstance(device, HostOnlyDevice)
    assert checked == [True, True] and not device.checks_arguments
