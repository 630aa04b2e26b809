"""Every family, in every way that a request may be computed: the reference's tokens in fp32, the same bits in bf16.

A family is a row of ``tests/models/rows``; the rows that turn its switches, named behind a comma, are of the whole suite.
See `tests.models.random_checkpoints` for what it is compared with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.equality import MORE_WAYS, WAYS, Loaded, alone, furthest, in_every_way, load, run
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
    loaded: Loaded, row: Row, expected: list[Expectation], ways: dict[str, dict[str, int]]
) -> None:
    """The tokens are the reference's, and the logits near its own."""
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    by_itself = alone(loaded, prompts)
    assert furthest(by_itself, expected) < row.close
    assert by_itself.outputs == outputs
    for way, outcome in in_every_way(loaded, prompts, False, ways):
        assert outcome.outputs == outputs, way


def check_once(loaded: Loaded, row: Row, expected: list[Expectation]) -> None:
    """The same of all prompts together."""
    outcome = run(loaded, changed(loaded.config), [each.prompt for each in expected], watched=True)
    assert outcome.outputs == [each.outputs for each in expected]
    assert furthest(outcome, expected) < row.close


def check_bits(loaded: Loaded, prompts: list[list[int]], ways: dict[str, dict[str, int]]) -> None:
    """Whatever way a prompt is computed, each of its tokens is drawn from the same bits."""
    by_itself = alone(loaded, prompts)
    for way, outcome in in_every_way(loaded, prompts, True, ways):
        differing = [key for key, bits in outcome.bits.items() if by_itself.bits[key] != bits]
        assert not differing, (way, differing[:3])
        assert len(outcome.bits) == len(by_itself.bits), way


def check_quantized(folder: Path, row: Row, expected: list[Expectation]) -> None:
    """Rounded weights load and say about the same: the first logits of a prompt go with the reference's."""
    prompts = [each.prompt for each in expected]
    for quantization, least in zip(("int8", "int4"), row.quantized, strict=True):
        loaded = load(folder, quantization=quantization)
        outcome = alone(loaded, prompts)
        for i, each in enumerate(expected):
            first = torch.frombuffer(bytearray(outcome.bits[i, len(each.prompt)]), dtype=torch.float32)
            alike = float(torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1])
            assert alike > least, (quantization, len(each.prompt), alike)


def _is_variant(name: str) -> bool:
    """Whether a family with some of its switches turned, which the fast suite leaves out: "phi3, window"."""
    family, comma, _ = name.partition(",")
    return bool(comma) and next(row for row in ROWS if row.partition(",")[0] == family) != name


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.whole) if _is_variant(name) else name for name in ROWS]
)
def test_a_family_is_equal(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path)
    by_torch = load(tmp_path, compiled=False)
    if not row.recorded:
        check_tokens(by_torch, row, expected, WAYS)
    else:
        check_once(by_torch, row, expected)  # in all ways: the whole suite
        check_tokens(load(tmp_path), row, expected, WAYS)
        check_bits(load(tmp_path, "bfloat16"), [each.prompt for each in expected], WAYS)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if row.recorded])
def test_a_familys_weights_are_rounded(family: str, tmp_path: Path) -> None:
    check_quantized(tmp_path, ROWS[family], made(ROWS[family], tmp_path))


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if row.recorded])
def test_a_family_is_equal_in_more_ways(family: str, dtype: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path, seed=7)
    loaded = load(tmp_path, dtype)  # type: ignore[arg-type]
    if dtype == "float32":
        check_tokens(loaded, row, expected, MORE_WAYS)
        check_tokens(load(tmp_path, compiled=False), row, expected, MORE_WAYS)
    check_bits(loaded, [each.prompt for each in expected], MORE_WAYS)
