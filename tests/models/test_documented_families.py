"""What the documents say of families is what the registry has."""

from tests.models.documented_families import BEGIN, DOCUMENT, END, README, README_ROW, readme_row, table

WAY = "python -m tests.models.documented_families writes it"


def test_the_table_of_families_is_the_registry() -> None:
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == table(), WAY


def test_the_readme_names_every_family() -> None:
    lines = README.read_text().splitlines(keepends=True)
    assert [line for line in lines if line.startswith(README_ROW)] == [readme_row()], WAY
