"""A path leads to the row that spells it, or to the one whose open part it fits."""

from __future__ import annotations

import pytest

from quintet.frontend.paths import PathTable

TABLE = PathTable(
    [
        ("/v1/models", "models"),
        ("/v1/models/{id:path}", "model"),
        ("/v1/streams/{id}", "stream"),
        ("/v1/streams/all", "every stream"),
    ]
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/models", ("models", {})),
        ("/v1/models/", ("model", {"id": ""})),
        ("/v1/models/Qwen/Qwen3-0.6B", ("model", {"id": "Qwen/Qwen3-0.6B"})),
        ("/v1/models/a\nb", ("model", {"id": "a\nb"})),
        ("/v1/streams/7", ("stream", {"id": "7"})),
        ("/v1/streams/all", ("every stream", {})),
        ("/v1/streams/", None),
        ("/v1/streams/7/8", None),
        ("/v1/streams", None),
        ("/v1/modelsx", None),
        ("/V1/models", None),
        ("", None),
    ],
)
def test_a_path_leads_to_one_row(path: str, found: tuple[str, dict[str, str]] | None) -> None:
    assert TABLE.find(path) == found
