"""The table of families in docs/models.md equals the registry."""

from tests.models.documented_families import BEGIN, DOCUMENT, END, table

WAY = "python -m tests.models.documented_families writes it"


def test_family_table_equals_the_registry() -> None:
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == table(), WAY
