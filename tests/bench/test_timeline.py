"""Timeline figure: spans of all processes."""

from bench.timeline.figure import COLOURS

from quintet.process.trace import SPANS


def test_every_span_has_a_colour() -> None:
    assert COLOURS.keys() == SPANS.keys()
