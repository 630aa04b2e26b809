"""Timeline figure of a step: to scale, one lane per process, valid XML."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.timeline.__main__ import decode_steps_of, typical_steps
from bench.timeline.figure import draw

from quintet.deploy.tools.step_account import Bar, Step

MS = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"


def world() -> list[Bar]:
    """Four steps of 10 ms, 8 ms of them layers, and spans of the other processes between them."""
    bars = []
    for step in (4, 5, 6, 7):
        at = 10 * step * MS
        bars += [
            Bar(at - MS, at, "executor-0", "wait", step),
            Bar(at, at + 8 * MS, "executor-0", "layers", step),
            Bar(at + 8 * MS, at + 9 * MS, "executor-0", "sampling", step),
            Bar(at + MS, at + 2 * MS, "core-0", "plan", step + 1),
            Bar(at + 9 * MS, at + 10 * MS, "core-0", "commit", step),
            Bar(at + 10 * MS, at + 11 * MS, "core-0", "send", step),
            Bar(at + 11 * MS, at + 12 * MS, "detokenizer-0", "detokenize", step),
            Bar(at + 12 * MS, at + 13 * MS, "frontend-0", "text", step),
        ]
    return sorted(bars)


def titled(root: ElementTree.Element) -> list[tuple[str, float, float]]:
    """Return the titled boxes: title, left edge and width."""
    return [
        (title.text or "", float(box.attrib["x"]), float(box.attrib["width"]))
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None
    ]


def test_bar_widths_match_durations() -> None:
    steps = [Step(4, 40 * MS, 50 * MS), Step(5, 50 * MS, 60 * MS)]
    root = ElementTree.fromstring(draw("a title", ["a caption"], world(), steps))
    boxes = titled(root)
    layers = next(box for box in boxes if box[0].startswith("layers 4:"))
    sampling = next(box for box in boxes if box[0].startswith("sampling 4:"))
    assert layers[2] > 100
    assert abs(layers[2] - 8 * sampling[2]) < 1.0  # both are rounded to tenths
    assert abs(sampling[1] - (layers[1] + layers[2])) < 0.3


def test_every_process_and_the_plans_in_flight_have_a_lane() -> None:
    steps = [Step(4, 40 * MS, 50 * MS), Step(5, 50 * MS, 60 * MS)]
    root = ElementTree.fromstring(draw("a < b", [], world(), steps))
    words = [text.text for text in root.iter(f"{SVG}text")]
    for lane in ("plans in flight", "executor", "core", "detokenizer", "frontend", "tokenizer", "a < b"):
        assert lane in words
    assert "plan 5" in {title for title, _, _ in titled(root)}


def test_drawn_steps_are_the_most_typical_sequence() -> None:
    lengths = (10, 90, 11, 10, 10, 12, 40)
    starts_of = [sum(lengths[:at]) for at in range(len(lengths))]
    steps = [Step(at, starts_of[at] * MS, (starts_of[at] + lengths[at]) * MS) for at in range(len(lengths))]
    assert [step.number for step in typical_steps(steps, 3)] == [2, 3, 4]


def test_decode_excerpt_is_the_middle_of_the_last_load() -> None:
    bars = [Bar(5 * MS, 6 * MS, "core-0", "admit", 3), Bar(105 * MS, 106 * MS, "core-0", "admit", 3)]
    bars += [Bar((10 * at - 1) * MS, 10 * at * MS, "executor-0", "wait", at) for at in range(1, 31)]
    assert [step.number for step in decode_steps_of(sorted(bars), 16)] == [15, 16, 17, 18, 19, 20, 21, 22]
