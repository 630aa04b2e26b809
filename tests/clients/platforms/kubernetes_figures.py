"""Shipped Prometheus queries, parsed and checked against the metrics of a real server.

If Prometheus is installed, it scrapes the server and evaluates the queries.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser as promql

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.deploy.integrations.prometheus_queries import labels_of, queries, variables

Labels = dict[str, set[str]]
EMPTY_IF_HEALTHY = (
    "HTTP errors",
    "Rejected requests",
    "Preemptions",
    "Effects of process failures",
    "Process restarts",
)
"""Panels that may be empty for a server without failures."""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def labels(expression: Any, known: Labels) -> set[str]:
    """Return the labels of an expression's result; fail if it refers to an unknown metric or label."""
    match expression:
        case promql.VectorSelector():
            name = expression.name
            assert name in known, f"the metric {name} does not exist"
            names = {matcher.name for matcher in expression.matchers.matchers}
            assert names <= known[name], f"{name} has no label {names - known[name]}"
            return known[name]
        case promql.MatrixSelector():
            return labels(expression.vector_selector, known)
        case promql.Call():
            return set().union(*(labels(argument, known) for argument in expression.args))
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return labels(expression.expr, known)
        case promql.BinaryExpr():
            return labels(expression.lhs, known) | labels(expression.rhs, known)
        case promql.AggregateExpr():
            inner = labels(expression.expr, known)
            by = set(expression.modifier.labels) if expression.modifier else set()
            assert by <= inner, f"grouped by {by - inner}, which is no label of the operand"
            return by
        case _:
            return set()


def check_parsed(known: Labels) -> None:
    for query in queries():
        try:
            labels(promql.parse(query.text), known)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{query.where}: {error}\n{query.text}") from None
    for text, label in variables():
        assert label in labels(promql.parse(text), known), text


@contextmanager
def prometheus(server: str) -> Iterator[Callable[[str], Any]]:
    """Run a Prometheus that scrapes ``server`` as the PodMonitor does; yield a function that evaluates an expression."""
    address = urllib.parse.urlsplit(server).netloc
    target = {"targets": [address], "labels": {"namespace": "default", "pod": "quintet-5d8f9b-x2x7q"}}
    scrape = {"job_name": "quintet", "scrape_interval": "1s", "static_configs": [target]}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        process = subprocess.Popen(
            [*command, "--web.listen-address=127.0.0.1:39090"], stderr=subprocess.DEVNULL
        )
        try:
            yield lambda text: json.loads(
                get("http://127.0.0.1:39090/api/v1/query?" + urllib.parse.urlencode({"query": text}))
            )["data"]["result"]
        finally:
            process.terminate()
            process.wait(30)


def ask_server(server: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "def f(x):", "max_tokens": 24, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json"}
    for _ in range(3):
        urllib.request.urlopen(
            urllib.request.Request(server + "/v1/completions", body, headers), timeout=60
        ).read()


def check_evaluated(server: str, model: str) -> None:
    with prometheus(server) as ask:
        deadline = time.monotonic() + 60
        while True:
            ask_server(server, model)
            try:
                if ask("sum(increase(quintet:generation_tokens_total[1m])) > 0"):
                    break
            except OSError:
                pass  # Prometheus is starting
            assert time.monotonic() < deadline, "Prometheus saw no token within a minute"
            time.sleep(0.5)
        for query in queries():
            found = ask(query.text)
            assert found or any(words in query.where for words in EMPTY_IF_HEALTHY), (
                f"nothing: {query.where}: {query.text}"
            )
    print("ok: evaluated by Prometheus")


def main(server: str, model: str) -> None:
    ask_server(server, model)
    check_parsed(labels_of(get(server + "/metrics")))
    print(f"ok: {len(queries())} queries")
    if shutil.which("prometheus"):
        check_evaluated(server, model)


main(*sys.argv[1:3])
