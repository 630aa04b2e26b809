"""Every shipped Prometheus query and its metric names: dashboard, KEDA triggers, adapter rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "integrations" / "grafana" / "quintet.json"
ADAPTER = ROOT / "deploy" / "integrations" / "kubernetes" / "prometheus-adapter.yaml"
REPLICAS = ROOT / "deploy" / "integrations" / "kubernetes" / "quintet-replicas.yaml"

FROM_PROMETHEUS = {"instance", "namespace", "pod"}
"""Labels that a scrape adds."""
_FILLED_IN = {
    "$__rate_interval": "1m",
    '"$model"': '".*"',
    '"$instance"': '".*"',
    "<<.LabelMatchers>>": 'namespace="default",pod=~"quintet-1"',
    "<<.GroupBy>>": "pod",
}
_SELECTOR = re.compile(r"\b((?:quintet|vllm):\w+)(\{[^}]*\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=|!=)~?\s*\"")
_VARIABLE = re.compile(r"label_values\((.*), (\w+)\)")
_SERIES = re.compile(r"^((?:quintet|vllm):\w+)(?:\{(.*)\})? ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, with variables replaced as Grafana and the adapter replace them."""

    where: str
    text: str


def queries() -> list[Query]:
    """Return every shipped query."""
    found = [*_of_dashboard(), *_of_keda(), *_of_adapter()]
    return [Query(query.where, _filled(query.text)) for query in found]


def variables() -> list[tuple[str, str]]:
    """Return selector and label of each dashboard variable."""
    matched = [
        _VARIABLE.fullmatch(variable["query"]["query"])
        for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]
        if variable["type"] == "query"
    ]
    return [(_filled(match[1]), match[2]) for match in matched if match]


def _filled(text: str) -> str:
    for word, value in _FILLED_IN.items():
        text = text.replace(word, value)
    return text


def _of_dashboard() -> Iterator[Query]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield Query(f"panel {panel['title']!r}", target["expr"])
    for annotation in dashboard["annotations"]["list"]:
        yield Query(f"annotation {annotation['name']!r}", annotation["expr"])


def _of_keda() -> Iterator[Query]:
    for thing in yaml.safe_load_all(REPLICAS.read_text()):
        if thing["kind"] == "ScaledObject":
            for trigger in thing["spec"]["triggers"]:
                yield Query("KEDA's trigger", trigger["metadata"]["query"])


def _of_adapter() -> Iterator[Query]:
    for rule in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]:
        yield Query(f"rule {rule['name']['as']}", rule["metricsQuery"])
        yield Query(f"rule {rule['name']['as']}", rule["seriesQuery"])


def names_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield every metric of a query with its selector labels."""
    for name, selector in _SELECTOR.findall(text):
        yield name, set(_LABEL.findall(selector))


def labels_of(metrics: str) -> dict[str, set[str]]:
    """Return the labels of each series in the text of ``/metrics``."""
    labels: dict[str, set[str]] = {}
    for name, pairs in _SERIES.findall(metrics):
        labels.setdefault(name, set(FROM_PROMETHEUS)).update(re.findall(r"(\w+)=\"", pairs or ""))
    return labels
