"""Draw steps as SVG: one lane per process, and below them the boundary between two steps, enlarged.

The input is spans and steps of `quintet.deploy.tools.step_account`; the module uses no server and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from quintet.deploy.tools.step_account import WAITING, Bar, Step

MS = 1e6
WIDTH, GUTTER, MARGIN = 1200, 118, 14
LANE, LANE_GAP = 30, 9
BAR_HEIGHT = 24
CHARACTER_WIDTH = 6.1
"""Approximate width of a character of a label, in pixels."""

COLOURS = {
    "encode": "#8c7ae6",
    "admit": "#c7b8f5",
    "plan": "#2a78c2",
    "commit": "#7db7e8",
    "send": "#b9bec6",
    "wait": "#f0f1f3",
    "bubble": "#f0f1f3",
    "idle_tasks": "#b0a08c",
    "orders": "#b9bec6",
    "tables": "#f2c14e",
    "arrays": "#f78154",
    "layers": "#3f9b6b",
    "logits": "#7cc49a",
    "device": "#3f9b6b",
    "sampling": "#d65780",
    "detokenize": "#8f6fb3",
    "text": "#d9a441",
    "events": "#c97b3c",
}
DARK = frozenset({"plan", "layers", "sampling", "detokenize", "events", "encode"})
"""Span names with white labels."""

LANES = (
    ("executor", "executor"),
    ("core", "core"),
    ("detokenizer", "detokenizer"),
    ("frontend", "frontend"),
    ("tokenizer", "tokenizer"),
)

MESSAGES = (
    ("executor", "send", "core", "commit"),
    ("core", "send", "detokenizer", "detokenize"),
    ("detokenizer", "detokenize", "frontend", "text"),
)
"""Messages of a step: role and name of the sending span, role and name of the span that begins at the arrival. The sending span
is the last one of its name in the step."""


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """Interval between the planning of a step and the commit of its result."""

    step: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Canvas:
    """List of SVG elements."""

    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        """Draw a rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">'
            + (f"<title>{escape(title)}</title>" if title else "")
            + "</rect>"
        )

    def text(
        self, x: float, y: float, label: str, *, size: int = 11, fill: str = "#24292f", anchor: str = "start",
        weight: str = "normal",
    ) -> None:  # fmt: skip
        """Draw a line of text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(label)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> None:
        """Draw a thin line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
            f'stroke-width="1"{dashes}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw the arrow of a message."""
        middle = (y1 + y2) / 2
        self.parts.append(
            f'<path d="M{x1:.1f},{y1:.1f} C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}" '
            'fill="none" stroke="#57606a" stroke-width="1" marker-end="url(#head)"/>'
        )

    def document(self, height: float) -> str:
        """Return the SVG document."""
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
                f'height="{height:.0f}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
                'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#57606a"/></marker></defs>',
                f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            )
        )


class Panel:
    """Lanes of all processes for an interval of time, drawn below ``top``."""

    def __init__(self, canvas: Canvas, top: float, begin_ns: float, end_ns: float, origin_ns: float) -> None:
        self.canvas = canvas
        self.bottom = top
        self._begin_ns, self._end_ns, self._origin_ns = begin_ns, end_ns, origin_ns
        self._scale = (WIDTH - GUTTER - MARGIN) / (end_ns - begin_ns)
        self._lanes: dict[str, float] = {}

    def x(self, at_ns: float) -> float:
        """Return the x coordinate of a time, clamped to the panel."""
        return GUTTER + (min(max(at_ns, self._begin_ns), self._end_ns) - self._begin_ns) * self._scale

    def shows(self, begin_ns: float, end_ns: float) -> bool:
        """Return True if a span overlaps the panel's interval."""
        return end_ns > self._begin_ns and begin_ns < self._end_ns

    def axis(self) -> None:
        """Draw the time axis: milliseconds since the start of the first step."""
        span_ms = (self._end_ns - self._begin_ns) / MS
        step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9) if span_ms / s <= 12)
        tick = -(-(self._begin_ns - self._origin_ns) // (step * MS)) * step
        height = self.bottom + 14
        while self._origin_ns + tick * MS <= self._end_ns:
            x = self.x(self._origin_ns + tick * MS)
            self.canvas.text(x, height, f"{tick + 0.0:g} ms", size=10, fill="#57606a", anchor="middle")
            self.canvas.line(x, height + 4, x, height + 8, "#8c959f")
            tick = round(tick + step, 6)
        self.bottom = height + 12

    def lane(
        self, name: str, title: str, bars: Iterable[Bar], note: str = "", labels_above: bool = False
    ) -> None:
        """Draw the spans of one process. labels_above: draw their names above the lane."""
        y = self.bottom
        self._lanes[name] = y
        self.canvas.text(GUTTER - 10, y + 16, title, anchor="end", weight="bold")
        self.canvas.rect(GUTTER, y, WIDTH - GUTTER - MARGIN, BAR_HEIGHT, "#f6f8fa")
        shown = [bar for bar in bars if self.shows(bar.begin_ns, bar.end_ns) and bar.name not in WAITING]
        for index, bar in enumerate(shown):
            following = shown[index + 1].begin_ns if index + 1 < len(shown) else self._end_ns
            self._bar(bar, y, self.x(following), labels_above)
        if labels_above:
            self._names_above(shown, y - 3)
        if not shown and note:
            self.canvas.text(GUTTER + 8, y + 16, note, size=10, fill="#57606a")
        self.bottom = y + LANE + LANE_GAP

    def _bar(self, bar: Bar, y: float, free_until: float, is_named: bool) -> None:
        left, right = self.x(bar.begin_ns), self.x(bar.end_ns)
        width = max(right - left, 1.0)
        ms = (bar.end_ns - bar.begin_ns) / MS
        self.canvas.rect(
            left, y, width, BAR_HEIGHT, COLOURS[bar.name], f"{bar.name} {bar.number}: {ms:.3f} ms"
        )
        suffix = f" of step {bar.number}" if bar.name == "layers" else ""
        labels = (f"{bar.name}{suffix}: {ms:.2f} ms", f"{bar.name} {ms:.2f}", bar.name)
        for label in (f"{ms:.2f} ms", f"{ms:.2f}") if is_named else labels:
            if len(label) * CHARACTER_WIDTH + 6 <= width:
                fill = "#ffffff" if bar.name in DARK else "#24292f"
                self.canvas.text((left + right) / 2, y + 16, label, size=10, fill=fill, anchor="middle")
                return
        if not is_named and len(bar.name) * CHARACTER_WIDTH + 6 <= free_until - left - width:
            self.canvas.text(left + width + 3, y + 16, bar.name, size=10, fill="#57606a")

    def _names_above(self, bars: Iterable[Bar], y: float) -> None:
        label_end = 0.0
        last = ("", 0)
        for bar in bars:
            left = self.x(bar.begin_ns)
            label = bar.name if bar.name == "events" else f"{bar.name} {bar.number}"
            if left >= label_end and (bar.name, bar.number) != last:
                self.canvas.text(left, y, label, size=9, fill="#57606a")
                label_end = left + len(label) * CHARACTER_WIDTH * 0.9 + 6
                last = bar.name, bar.number

    def plans(self, plans: Iterable[PlanInFlight]) -> None:
        """Draw the plans in flight; even steps are above odd ones."""
        y = self.bottom
        self.canvas.text(GUTTER - 10, y + 22, "plans in flight", anchor="end", weight="bold")
        for plan in plans:
            if not self.shows(plan.begin_ns, plan.end_ns):
                continue
            left, right = self.x(plan.begin_ns), self.x(plan.end_ns)
            top = y + (plan.step % 2) * 19
            self.canvas.rect(left, top, max(1.0, right - left), 16, "#dbe9f6", f"plan {plan.step}")
            self.canvas.line(left, top, left, top + 16, "#2a78c2")
            self.canvas.line(right, top, right, top + 16, "#2a78c2")
            label = f"plan {plan.step}: {(plan.end_ns - plan.begin_ns) / MS:.1f} ms from plan to commit"
            if len(label) * CHARACTER_WIDTH > right - left:
                label = f"plan {plan.step}"
            if len(label) * CHARACTER_WIDTH <= right - left:
                self.canvas.text(left + 5, top + 12, label, size=10, fill="#1b4b7a")
        self.bottom = y + 36 + LANE_GAP

    def boundaries(self, steps: Iterable[Step], top: float) -> None:
        """Mark the starts and ends of steps."""
        for step in steps:
            for at in (step.begin_ns, step.end_ns):
                if self._begin_ns <= at <= self._end_ns:
                    x = self.x(at)
                    self.canvas.line(x, top, x, self.bottom - LANE_GAP, "#8c959f", "3,3")

    def messages(self, bars: Sequence[Bar]) -> None:
        """Draw the messages between the lanes."""
        ends = {(bar.role, bar.name, bar.number): bar for bar in bars}
        for from_role, from_name, to_role, to_name in MESSAGES:
            for (role, name, number), target in ends.items():
                if (role, name) != (to_role, to_name):
                    continue
                source = ends.get((from_role, from_name, number))
                if source is None or not self._begin_ns <= target.begin_ns <= self._end_ns:
                    continue
                sent_ns = min(source.end_ns, target.begin_ns)  # a sender may be preempted after it sends
                self.canvas.arrow(
                    self.x(sent_ns), self._lanes[from_role] + BAR_HEIGHT,
                    self.x(target.begin_ns), self._lanes[to_role] - 1,
                )  # fmt: skip


def plans_of(bars: Sequence[Bar]) -> list[PlanInFlight]:
    """Return the intervals of all committed plans."""
    committed = {bar.number: bar.end_ns for bar in bars if bar.role == "core" and bar.name == "commit"}
    return [
        PlanInFlight(bar.number, bar.begin_ns, committed[bar.number])
        for bar in bars
        if bar.role == "core" and bar.name == "plan" and bar.number in committed
    ]


def draw(title: str, caption: Sequence[str], bars: Sequence[Bar], steps: Sequence[Step]) -> str:
    """Return an SVG figure of successive steps, with the boundary after the first one enlarged."""
    canvas = Canvas()
    canvas.text(MARGIN, 26, title, size=16, weight="bold")
    top: float = 32
    for line in caption:
        top += 17
        canvas.text(MARGIN, top, line, size=11, fill="#57606a")
    origin, end = steps[0].begin_ns, steps[-1].end_ns
    pad = (end - origin) * 0.02
    zoom_begin, zoom_end = boundary_interval(bars, steps[0], steps[1])

    overview = Panel(canvas, top + 12, origin - pad, end + pad, origin)
    overview.axis()
    begin = overview.bottom
    overview.plans(plans_of(bars))
    _lanes(overview, bars)
    overview.boundaries(steps, begin)
    left, right = overview.x(zoom_begin), overview.x(zoom_end)
    canvas.parts.append(
        f'<rect x="{left - 2:.1f}" y="{begin - 2:.1f}" width="{right - left + 4:.1f}" '
        f'height="{overview.bottom - begin:.1f}" fill="none" stroke="#cf222e" stroke-width="1.5"/>'
    )

    zoom_top = overview.bottom + 34
    canvas.line(left - 2, overview.bottom - 2, GUTTER, zoom_top + 6, "#cf222e", "2,3")
    canvas.line(right + 2, overview.bottom - 2, WIDTH - MARGIN, zoom_top + 6, "#cf222e", "2,3")
    factor = (end - origin + 2 * pad) / (zoom_end - zoom_begin)
    canvas.text(
        WIDTH / 2, zoom_top - 6, f"boundary between steps {steps[0].number} and {steps[1].number}, enlarged {factor:.0f} times",
        size=12, fill="#cf222e", anchor="middle", weight="bold",
    )  # fmt: skip
    zoom = Panel(canvas, zoom_top + 4, zoom_begin, zoom_end, origin)
    zoom.axis()
    begin = zoom.bottom
    _lanes(zoom, bars, labels_above=True)
    zoom.boundaries(steps, begin)
    zoom.messages(bars)
    return canvas.document(_legend(canvas, zoom.bottom + 6) + MARGIN)


def boundary_interval(bars: Sequence[Bar], one: Step, other: Step) -> tuple[float, float]:
    """Return the interval from a step's sampling to the end of the work on its output text."""
    sampling = [b for b in bars if b.role == "executor" and b.number == one.number and b.name == "sampling"]
    begin = sampling[0].begin_ns if sampling else one.end_ns
    sent = [
        bar.end_ns
        for bar in bars
        if bar.role in ("core", "detokenizer", "frontend")
        and begin < bar.begin_ns < (other.begin_ns + other.end_ns) / 2
    ]
    end = max([other.begin_ns, *sent])
    pad = (end - begin) * 0.06
    return begin - pad, end + pad


def _lanes(panel: Panel, bars: Sequence[Bar], *, labels_above: bool = False) -> None:
    for role, title in LANES:
        note = "idle during decode: it works once per request" if role == "tokenizer" else ""
        if not (labels_above and role == "tokenizer"):
            panel.bottom += 12 if labels_above else 0
            panel.lane(role, title, [bar for bar in bars if bar.role == role], note, labels_above)
        if role == "executor":
            for part in sorted({bar.role for bar in bars if " " in bar.process}):
                panel.bottom += 12 if labels_above else 0
                panel.lane(part, part, [bar for bar in bars if bar.role == part], labels_above=labels_above)


def _legend(canvas: Canvas, top: float) -> float:
    """Draw the legend of colours; return the bottom of the figure."""
    x = float(GUTTER)
    names = [name for name in COLOURS if name not in ("encode", "admit", "orders", *WAITING)]
    for name in names:
        canvas.rect(x, top, 12, 12, COLOURS[name])
        canvas.text(x + 16, top + 10, name, size=10, fill="#57606a")
        x += 30 + len(name) * CHARACTER_WIDTH
    return top + 14
