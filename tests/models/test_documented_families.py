"""What the documents say of families is what the registry has."""

from tests.models.documented_families import BEGIN, DOCUMENT, END, IN_README, README, readme_list, table

WAY = "python -m tests.models.documented_families writes it"


def test_the_table_of_families_is_the_registry() -> None:
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == table(), WAY


def test_the_readme_names_every_family() -> None:
    _, _, below = README.read_text().partition(IN_README)
    assert below.startswith(readme_list()), WAY
