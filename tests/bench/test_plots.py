"""Plots of the documentation."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from bench.docs import plots


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_a_plot_is_well_formed_and_equals_its_file(name: str) -> None:
    drawn = plots.PLOTS[name]()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (plots.FOLDER / name).read_text() == drawn


def test_the_longest_bar_of_a_row_fills_the_width() -> None:
    drawn = plots.bars("title", "note", [plots.Row("row", {"Quintet": 4.0, "vLLM": 2.0})])
    full = plots.WIDTH - plots.LEFT - plots.RIGHT
    assert f'width="{full:.1f}"' in drawn
    assert f'width="{full / 2:.1f}"' in drawn


@pytest.mark.parametrize(
    ("row_id", "label"),
    [
        ("stream-S-bf16", "0.5 B, bf16, one stream"),
        ("clients32-S-q4_k_m", "0.5 B, Q4_K_M, 32 clients"),
        ("prompt-M-int8", "1.2 B, 8-bit weights, 2 048-token prompt"),
    ],
)
def test_a_row_id_becomes_a_label(row_id: str, label: str) -> None:
    assert plots.label_of(row_id) == label
