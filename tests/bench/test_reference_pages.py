"""Pages of docs/reference: equal to the generator's, with all metrics and the meanings of all fields."""

from __future__ import annotations

import pytest
from bench.docs.fields import MEANINGS
from bench.docs.reference import FOLDER, NOTE, pages


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", ["cli.md", "http.md", "python.md", "metrics.md", "errors.md"])
def test_a_page_is_the_generated_one(name: str, generated: dict[str, str]) -> None:
    assert (FOLDER / name).read_text() == NOTE + generated[name].rstrip() + "\n"


@pytest.mark.parametrize("name", ["http.md", "python.md"])
def test_every_field_has_a_meaning(name: str, generated: dict[str, str]) -> None:
    fields = [line for line in generated[name].splitlines() if line.startswith("| `")]
    assert len(fields) > 40 and [line for line in fields if line.endswith("|  |")] == []


def test_every_meaning_is_of_a_field(generated: dict[str, str]) -> None:
    text = generated["http.md"] + generated["python.md"]
    assert [key for key in MEANINGS if f"| `{key.rpartition('.')[2]}`" not in text] == []


@pytest.mark.parametrize(
    "metric",
    [
        *("quintet:kv_peers_info", "quintet:spec_decode_cached_requests", "quintet:executor_expert_hottest"),
        *("quintet:kv_store_blocks_total", "quintet:cache_config_info", "quintet_route:apart_total"),
    ],
)
def test_metrics_of_flags_models_and_the_router_are_listed(metric: str, generated: dict[str, str]) -> None:
    assert f"| `{metric}` |" in generated["metrics.md"]
