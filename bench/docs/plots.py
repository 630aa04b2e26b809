"""Draw the plots of the documentation from recorded results, as SVG without dependencies.

python -m bench.docs.plots            # write docs/plots
python -m bench.docs.plots --check    # exit 1 if a plot differs from its file
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.arguments import command_parser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
FOLDER = ROOT / "docs" / "plots"
COLORS = {"Quintet": "#0969da", "vLLM": "#bf8700", "OpenVINO": "#8250df", "llama.cpp": "#57606a"}
PEERS = "peers-2026-11-22-zen5-all.json"
PEERS_EMR = "peers-2026-11-21-night.json"
PEERS_AMX = "peers-2026-11-28-amx.json"
PEERS_AVX2 = "peers-2026-11-22-avx2.json"
GGUF_ZEN5 = "peers-2026-11-24-zen5-gguf-asked.json"
GGUF_EMR = "peers-2026-11-23-emr-gguf2.json"
FORMATS = {"bf16": "bf16", "int8": "8-bit weights", "int4": "4-bit weights", "w8a8": "w8a8"}
CLIENT_ROWS = ("stream-S-bf16", "prompt-S-bf16", "clients8-S-bf16", "clients32-S-bf16")
SPECULATION = "speculation-suffix-2026-11-29-emr.json"
SPECULATION_Q4_1 = "speculation-suffix-2026-11-28-emr.json"
OVERHEAD = "overhead-2026-11-21.json"
WIDTH, BAR, GAP, LEFT, RIGHT = 760, 13, 16, 250, 70
FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"


@dataclass(frozen=True, slots=True)
class Row:
    """Bars of one measurement: a value for each series."""

    label: str
    values: dict[str, float]


def bars(title: str, note: str, rows: Sequence[Row]) -> str:
    """Return an SVG of horizontal bars. Each row has a scale of its own: its longest bar fills the width."""
    parts = [text(14, 24, title, 15, bold=True), text(14, 44, note, 11)]
    y, x = 62.0, 14.0
    series = [name for name in COLORS if any(name in row.values for row in rows)] or list(rows[0].values)
    for name in series:
        parts += [rectangle(x, y, 10, 10, COLORS.get(name, "#0969da")), text(x + 15, y + 9, name, 11)]
        x += 30 + 7 * len(name)
    y += 26
    for row in rows:
        parts.append(text(LEFT - 10, y + (BAR * len(row.values)) / 2 + 4, row.label, 11, anchor="end"))
        longest = max(row.values.values())
        for name, value in row.values.items():
            width = value / longest * (WIDTH - LEFT - RIGHT)
            parts.append(rectangle(LEFT, y, width, BAR - 2, COLORS.get(name, "#0969da")))
            parts.append(text(LEFT + width + 5, y + BAR - 4, shown(value), 10))
            y += BAR
        y += GAP
    return svg(WIDTH, y, parts)


def curve(title: str, note: str, x_title: str, y_title: str, points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG of a line through points at evenly spaced x positions."""
    height, top, bottom = 300.0, 70.0, 250.0
    parts = [text(14, 24, title, 15, bold=True), text(14, 44, note, 11)]
    most = max(y for _, y in points)
    step = (WIDTH - 160) / (len(points) - 1)
    places = [(90 + i * step, bottom - y / most * (bottom - top)) for i, (_, y) in enumerate(points)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - share * (bottom - top)
        parts.append(f'<line x1="90" y1="{y:.1f}" x2="{WIDTH - 60}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(text(82, y + 4, shown(share * most), 10, anchor="end"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>')
    for (x, y), (value, _) in zip(places, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#0969da"/>')
        parts.append(text(x, bottom + 18, shown(value), 10, anchor="middle"))
    parts += [
        text((WIDTH + 30) / 2, bottom + 38, x_title, 11, anchor="middle"),
        text(14, top - 10, y_title, 11),
    ]
    return svg(WIDTH, height, parts)


def scatter(
    title: str, note: str, x_title: str, y_title: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return an SVG of points; x is from 0 to 1, and a line is drawn at y = 1."""
    top, bottom, left, right = 84.0, 310.0, 60.0, WIDTH - 40.0
    points = [point for each in series.values() for point in each]
    least, most = min(0.75, *(y for _, y in points)), max(y for _, y in points) + 0.25
    lines = [quarter / 4 for quarter in range(math.ceil(4 * least), int(4 * most) + 1)]
    parts = [text(14, 24, title, 15, bold=True), text(14, 44, note, 11)]

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x * (right - left), bottom - (y - least) / (most - least) * (bottom - top)

    for y in lines:
        height = place(0, y)[1]
        color = "#57606a" if y == 1 else "#d0d7de"
        ends = f'x1="{left:.1f}" y1="{height:.1f}" x2="{right:.1f}" y2="{height:.1f}"'
        parts.append(f'<line {ends} stroke="{color}"/>')
        parts.append(text(left - 8, height + 4, f"{y:g}", 10, anchor="end"))
    for tenth in range(0, 11, 2):
        parts.append(text(place(tenth / 10, 0)[0], bottom + 18, f"{10 * tenth} %", 10, anchor="middle"))
    key = 14.0
    for (name, found), color in zip(series.items(), COLORS.values(), strict=False):
        parts += [rectangle(key, 54, 10, 10, color), text(key + 15, 63, name, 11)]
        key += 36 + 6.5 * len(name)
        for x, y in found:
            across, height = place(x, y)
            parts.append(f'<circle cx="{across:.1f}" cy="{height:.1f}" r="4" fill="{color}"/>')
    parts += [
        text((left + right) / 2, bottom + 38, x_title, 11, anchor="middle"),
        text(14, top - 6, y_title, 11),
    ]
    return svg(WIDTH, bottom + 52, parts)


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """Return an SVG document on a white ground."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}" font-family="{FONT}">'
    )
    return "\n".join((head, rectangle(0, 0, width, height, "#ffffff"), *parts, "</svg>\n"))


def text(x: float, y: float, words: str, size: int, anchor: str = "start", bold: bool = False) -> str:
    """Return a text element."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#24292f" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def shown(value: float) -> str:
    """Return a number with three significant digits and separated thousands."""
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}".replace(",", "\u202f")


def load(name: str) -> dict[str, Any]:
    """Return a recorded result."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return content


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a plot: its label, and the result file, row id and figure that it shows."""

    label: str
    file: str
    row_id: str
    figure: str


def peer_row(measured: Measured) -> Row:
    """Return the median of each engine."""
    values: dict[str, list[float]] = {}
    for record in load(measured.file)["records"]:
        counted = record["row"] == measured.row_id and measured.figure in record["figures"]
        if counted and record["engine"] in COLORS:
            values.setdefault(record["engine"], []).append(record["figures"][measured.figure])
    return Row(measured.label, {name: statistics.median(values[name]) for name in COLORS if name in values})


def throughput(file: str, row_ids: Sequence[str]) -> list[Row]:
    """Return rows of tokens per second of one result file."""
    return [peer_row(Measured(label_of(r), file, r, figure_of(r))) for r in row_ids]


def figure_of(row_id: str) -> str:
    """Return the name of a row's figure of throughput."""
    return {"stream": "decode_tok_s", "prompt": "prompt_tok_s"}.get(row_id.partition("-")[0], "output_tok_s")


def label_of(row_id: str) -> str:
    """Return a row id in words: model size, format, and load."""
    load_id, size, format_id = row_id.split("-", 2)
    model = {"S": "0.5 B", "M": "1.2 B", "L": "8 B", "E": "gpt-oss, 8 layers"}[size]
    numbers = FORMATS.get(format_id, format_id.upper())
    loads = {"stream": "one stream", "prompt": "2 048-token prompt"}
    return f"{model}, {numbers}, {loads.get(load_id, load_id.replace('clients', '') + ' clients')}"


def peers() -> str:
    """Throughput beside other engines on Zen 5."""
    rows = (*CLIENT_ROWS, "stream-M-bf16", "stream-M-int8", "stream-M-int4")
    note = "2 cores of an AMD EPYC (Zen 5), 2026-11-22; vLLM 0.32.0, OpenVINO GenAI 2026.4.1, llama.cpp (Python 0.3.36)"
    return bars("Tokens per second beside other engines", note, throughput(PEERS, rows))


def peers_emr() -> str:
    """Throughput beside other engines on Emerald Rapids without AMX."""
    quantized = ("stream-S-int8", "stream-S-int4", "prompt-S-w8a8")
    rows = (*CLIENT_ROWS, *quantized, "stream-M-bf16", "prompt-M-bf16", "stream-M-int8", "stream-M-int4")
    note = "2 cores of an Intel Xeon (Emerald Rapids, AMX not used), 2026-11-21, commits 7ac4130 to 4e6e2a3"
    return bars("Tokens per second beside other engines", note, throughput(PEERS_EMR, rows))


def peers_amx() -> str:
    """Throughput beside other engines on Emerald Rapids with AMX."""
    note = "2 cores of an Intel Xeon (Emerald Rapids, AMX), 2026-11-28, commit 1ba9cff7"
    return bars("Tokens per second beside other engines", note, throughput(PEERS_AMX, CLIENT_ROWS))


def peers_avx2() -> str:
    """Throughput beside other engines with AVX2."""
    rows = ("stream-S-bf16", "prompt-S-bf16", "stream-S-int4", "clients32-S-bf16")
    note = "2 cores of an AMD EPYC with AVX2, 2026-11-22, commit f018c25"
    return bars("Tokens per second beside other engines", note, throughput(PEERS_AVX2, rows))


def gguf_zen5() -> str:
    """Throughput of GGUF files on Zen 5."""
    streams = [f"stream-{size}-{name}" for size in "SM" for name in ("q8_0", "q4_0", "q4_k_m", "q6_k")]
    prompts = ["prompt-S-q4_k_m", "prompt-M-q4_k_m"]
    rows = throughput(GGUF_ZEN5, [*streams, *prompts])
    rows += throughput("peers-2026-11-24-zen5-gguf-clients.json", ["clients8-S-q4_k_m", "clients32-S-q4_k_m"])
    note = "2 cores of an AMD EPYC (Zen 5), 2026-11-24, commits 0dfe949a and 47b339b9"
    return bars("GGUF files: tokens per second beside llama.cpp", note, rows)


def gguf_emr() -> str:
    """Throughput of GGUF files on Emerald Rapids without AMX."""
    streams = [f"stream-{size}-{name}" for size in "SM" for name in ("q8_0", "q4_0", "q4_k_m", "q6_k")]
    others = [
        "stream-E-mxfp4",
        "prompt-S-q4_k_m",
        "prompt-E-mxfp4",
        "clients8-S-q4_k_m",
        "clients32-S-q4_k_m",
    ]
    note = "2 cores of an Intel Xeon (Emerald Rapids, AMX not used), 2026-11-23, commit cb2e339"
    rows = throughput(GGUF_EMR, [*streams, *others])
    return bars("GGUF files: tokens per second beside llama.cpp", note, rows)


def latency() -> str:
    """First token and pauses of 32 clients, by machine."""
    machines = (
        ("Zen 5", "peers-2026-11-24-zen5-clients.json"),
        ("Zen 4", "peers-2026-11-23-zen4-clients.json"),
        ("Emerald Rapids, AMX", PEERS_AMX),
        ("Emerald Rapids, no AMX", PEERS_EMR),
        ("AVX2", PEERS_AVX2),
    )
    figures = (("ttft_p50_s", "first token p50"), ("inter_token_p99_s", "between tokens p99"))
    rows = [
        peer_row(Measured(f"{machine}: {words}", file, "clients32-S-bf16", figure))
        for figure, words in figures
        for machine, file in machines
    ]
    note = "0.5 B shape, bf16, 256 tokens in, 64 out, 2 cores each; seconds, less is better"
    return bars("Latency with 32 clients", note, rows)


def clients() -> str:
    """Throughput of the server without a model, by number of streams."""
    points = [
        (
            float(point["streams"]),
            statistics.median(r["summary"]["output_tokens_per_s"] for r in point["repetitions"]),
        )
        for point in load(OVERHEAD)["points"]
        if point["case"].startswith("a:")
    ]
    note = "mock executor, HTTP, client and server on 2 cores of an AMD EPYC, 2026-11-21, commit 5cd8356"
    return curve(
        "Server throughput without a model", note, "concurrent streams", "output tokens/s", sorted(points)
    )


def speculation() -> str:
    """Speed with drafts over their acceptance, by number of streams."""
    reports = [*load(SPECULATION)["reports"], load(SPECULATION_Q4_1)]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in (row for report in reports for row in report["rows"]):
        name = f"{row['streams']} stream{'s' if row['streams'] > 1 else ''}"
        series.setdefault(name, []).append((row["accepted"], row["ratio"]))
    note = "SmolLM2-135M, bf16 and 4 bits, suffix decoding, 2 cores of an Intel Xeon (Emerald Rapids, AMX), 2026-11-29"
    titles = ("share of drafts that are accepted", "tokens/s with drafts / without")
    return scatter("Speculative decoding: speed over acceptance", note, *titles, series)


PLOTS: dict[str, Callable[[], str]] = {
    "peers.svg": peers,
    "peers-emr.svg": peers_emr,
    "peers-amx.svg": peers_amx,
    "peers-avx2.svg": peers_avx2,
    "gguf-zen5.svg": gguf_zen5,
    "gguf-emr.svg": gguf_emr,
    "latency.svg": latency,
    "clients.svg": clients,
    "speculation.svg": speculation,
}


def main() -> int:
    """Write or check the plots."""
    parser = command_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a plot differs from its file")
    check = parser.parse_args().check
    stale = []
    for name, draw in PLOTS.items():
        path, content = FOLDER / name, draw()
        if check and (not path.exists() or path.read_text() != content):
            stale.append(name)
        elif not check:
            path.write_text(content)
    if stale:
        print(f"docs/plots: {', '.join(stale)} differ: run `python -m bench.docs.plots`", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
