"""Compare Quintet with other engines on this machine: measure each row with all engines, alternating; write a table and raw JSON.

    python -m bench.peers install               once: environments, models, conversions (an hour on two cores, 40 GB)
    python -m bench.peers install --models S M  without the larger models (19 GB)
    python -m bench.peers run                   all rows, three repetitions (about two hours on two cores)
    python -m bench.peers run --rows stream-S-bf16 --engines Quintet llama.cpp --repetitions 1
    python -m bench.peers table                 write the table again from the raw records
    python -m bench.peers rows                  list the rows

An interrupted run resumes when it is started again with the same --name.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from bench.peers.dimensions import DIMENSIONS
from bench.peers.engines.interface import Contender, Home
from bench.peers.engines.llamacpp import LlamaCpp
from bench.peers.engines.openvino import OpenVino
from bench.peers.engines.quintet import Quintet
from bench.peers.engines.vllm import Vllm
from bench.peers.install import install
from bench.peers.measure import Plan, measure
from bench.peers.measurement_lock import MeasurementLock
from bench.peers.models import MAX_LEN
from bench.peers.records import Record, Report, read_records, this_machine, write_report
from bench.peers.table import markdown
from bench.peers.workload import ROWS, Row

ENGINES: tuple[Contender, ...] = (Quintet(), Vllm(), OpenVino(), LlamaCpp())
DEFAULT_HOME = Path("~/.cache/quintet-peers")
RESULTS = Path(__file__).parents[1] / "results"
KV_BYTES = 2 << 30


def main() -> int:
    """Run the command; return the exit status."""
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, _on_sigterm)
    home = Home(arguments.home.expanduser().resolve(), arguments.threads, MAX_LEN, KV_BYTES)
    engines = [engine for engine in ENGINES if engine.name in arguments.engines]
    rows = [row for row in ROWS if _is_chosen(row, arguments.rows, arguments.models)]
    if arguments.command == "rows":
        for row in rows:
            print(f"{row.id:<24} {row.words}")
        return 0
    if arguments.command == "install":
        install(home, [engine.name for engine in engines], arguments.models)
        return 0
    installed = [engine for engine in engines if engine.is_installed(home)]
    for engine in engines:
        if engine not in installed:
            print(f"{engine.name} is not installed; run `python -m bench.peers install`", file=sys.stderr)
    raw = home.folder / "runs" / f"{arguments.name}.jsonl"
    failures: list[Record] = []
    if arguments.command == "run":
        plan = Plan(
            rows,
            installed,
            arguments.repetitions,
            home,
            raw,
            MeasurementLock(arguments.lock, arguments.hold),
            arguments.foreign_share,
            arguments.tries,
        )
        failures = measure(plan)
    write_results(home, installed, raw, arguments.name)
    for failure in failures:
        where = f"{failure.row}, {failure.engine}, repetition {failure.repetition + 1}"
        print(f"not measured: {where}: {failure.error}", file=sys.stderr)
    if failures:
        print(f"run it again with --name {arguments.name} to measure the missing rows", file=sys.stderr)
    return 1 if failures else 0


def write_results(home: Home, engines: Sequence[Contender], raw: Path, name: str) -> None:
    """Write the table and the raw JSON of a run's records, and print the table."""
    versions = {engine.name: engine.versions(home) for engine in engines}
    records = read_records(raw)
    date = max((record.at[:10] for record in records), default=_today())
    report = Report(date, this_machine(), home.threads, versions, records)
    table = markdown(report, ROWS, [engine.name for engine in engines])
    write_report(RESULTS / f"{name}.json", report)
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM: raise SystemExit, so that ``finally`` blocks stop all engines."""
    raise SystemExit(128 + number)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _is_chosen(row: Row, rows: Sequence[str] | None, models: Sequence[str]) -> bool:
    return row.model in models and (rows is None or row.id in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [engine.name for engine in ENGINES]
    parser.add_argument("command", choices=("install", "run", "table", "rows"))
    parser.add_argument(
        "--home", type=Path, default=DEFAULT_HOME, help="environments, models, logs (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=[row.id for row in ROWS], metavar="ROW", help="(default: all)"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=names, default=names, metavar="ENGINE", help="(default: all)"
    )
    parser.add_argument(
        "--models", nargs="+", choices=DIMENSIONS, default=tuple(DIMENSIONS), help="(default: all)"
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="threads of each engine (default: %(default)s)"
    )
    parser.add_argument(
        "--name",
        default=f"peers-{_today()}",
        help="name of the result files in bench/results (default: %(default)s)",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock this file during starts and measurements"
    )
    parser.add_argument(
        "--hold",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="release the lock between measurements after this time (default: %(default)s)",
    )
    parser.add_argument(
        "--foreign-share",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="repeat a measurement if other programs used more than this share of the CPU time (default: %(default)s)",
    )
    parser.add_argument(
        "--tries", type=int, default=4, metavar="N", help="maximum number of tries (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
