"""Every family, in every schedule: the reference's tokens in fp32, the same bits in bf16.

A family is a row of ``tests/models/rows``. Rows of its switches, named after a comma, belong to the whole suite.
`tests.models.random_checkpoints` defines the reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.equality import (
    MORE_SCHEDULES,
    SCHEDULES,
    Loaded,
    alone,
    load,
    max_difference,
    run,
    run_schedules,
)
from tests.models.random_checkpoints import LENGTHS, Expectation, Row, expectations, write_checkpoint
from tests.models.rows import dense, falcon, gemma, gpt, latent, llama, moe, opt, remote_code, states
from tests.models.test_engine import changed

ROWS: dict[str, Row] = {
    **llama.ROWS,
    **dense.ROWS,
    **falcon.ROWS,
    **gemma.ROWS,
    **gpt.ROWS,
    **latent.ROWS,
    **opt.ROWS,
    **remote_code.ROWS,
    **moe.ROWS,
    **states.ROWS,
}


def made(row: Row, folder: Path, seed: int = 0) -> list[Expectation]:
    """Write the row's checkpoint into the folder."""
    return expectations(write_checkpoint(row, folder), LENGTHS, seed)


def check_tokens(
    loaded: Loaded, row: Row, expected: list[Expectation], schedules: dict[str, dict[str, int]]
) -> None:
    """Check that the tokens are the reference's, and the logits close to its own."""
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    by_itself = alone(loaded, prompts)
    assert max_difference(by_itself, expected) < row.close
    assert by_itself.outputs == outputs
    for schedule, outcome in run_schedules(loaded, prompts, False, schedules):
        assert outcome.outputs == outputs, schedule


def check_once(loaded: Loaded, row: Row, expected: list[Expectation]) -> None:
    """Check all prompts together."""
    outcome = run(loaded, changed(loaded.config), [each.prompt for each in expected], watched=True)
    assert outcome.outputs == [each.outputs for each in expected]
    assert max_difference(outcome, expected) < row.close


def check_bits(loaded: Loaded, prompts: list[list[int]], schedules: dict[str, dict[str, int]]) -> None:
    """Check that each token is drawn from the same bits in every schedule."""
    by_itself = alone(loaded, prompts)
    for schedule, outcome in run_schedules(loaded, prompts, True, schedules):
        differing = [key for key, bits in outcome.bits.items() if by_itself.bits[key] != bits]
        assert not differing, (schedule, differing[:3])
        assert len(outcome.bits) == len(by_itself.bits), schedule


def check_quantized(folder: Path, row: Row, expected: list[Expectation]) -> None:
    """Check that quantized weights load, and that the first logits of a prompt are similar to the reference's."""
    prompts = [each.prompt for each in expected]
    for quantization, least in zip(("int8", "int4"), row.quantized, strict=True):
        loaded = load(folder, quantization=quantization)
        outcome = alone(loaded, prompts)
        for i, each in enumerate(expected):
            first = torch.frombuffer(bytearray(outcome.bits[i, len(each.prompt)]), dtype=torch.float32)
            alike = float(torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1])
            assert alike > least, (quantization, len(each.prompt), alike)


def _is_variant(name: str) -> bool:
    """Return whether the row is a family with some of its switches changed, of the whole suite only: "phi3, window"."""
    family, comma, _ = name.partition(",")
    return bool(comma) and next(row for row in ROWS if row.partition(",")[0] == family) != name


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.whole) if _is_variant(name) else name for name in ROWS]
)
def test_family_is_equal(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path)
    by_torch = load(tmp_path, compiled=False)
    if not row.recorded:
        check_tokens(by_torch, row, expected, SCHEDULES)
    else:
        check_once(by_torch, row, expected)  # in all schedules: the whole suite
        check_tokens(load(tmp_path), row, expected, SCHEDULES)
        check_bits(load(tmp_path, "bfloat16"), [each.prompt for each in expected], SCHEDULES)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if row.recorded])
def test_quantized_weights_of_a_family(family: str, tmp_path: Path) -> None:
    check_quantized(tmp_path, ROWS[family], made(ROWS[family], tmp_path))


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if row.recorded])
def test_family_is_equal_in_more_schedules(family: str, dtype: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path, seed=7)
    loaded = load(tmp_path, dtype)  # type: ignore[arg-type]
    if dtype == "float32":
        check_tokens(loaded, row, expected, MORE_SCHEDULES)
        check_tokens(load(tmp_path, compiled=False), row, expected, MORE_SCHEDULES)
    check_bits(loaded, [each.prompt for each in expected], MORE_SCHEDULES)
