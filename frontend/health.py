"""Status endpoints: /livez, /readyz, /health, /ping, /v2/…, /version, /load and /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from quintet.frontend.api.openai.parse import check_model
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.errors import RequestError
from quintet.wire.request import model_names
from quintet.wire.supervision import MetricsReport, ProcessMetrics

SUPERVISOR_ANSWERS_S = 1.0
"""Timeout of the supervisor. If it is silent for longer, the topology counts as stale."""


async def livez(_service: Service, http_request: HttpRequest) -> None:
    """Answer 200: the event loop runs."""
    await http_request.respond(200, b"ok", b"text/plain")


async def readyz(service: Service, http_request: HttpRequest) -> None:
    """Answer 200 if requests can be served, else 503 with the missing roles."""
    missing = [str(role) for role in service.requests.workers.missing()]
    ready = not missing and not service.draining
    await http_request.respond_json(
        {"ready": ready, "missing": missing, "draining": service.draining}, 200 if ready else 503
    )


async def v2_live(_service: Service, http_request: HttpRequest) -> None:
    """Answer as `livez`, in the format of the Open Inference Protocol (KServe, Triton)."""
    await http_request.respond_json({"live": True})


async def v2_model_ready(service: Service, http_request: HttpRequest) -> None:
    """Answer whether the named model can serve requests."""
    name = _served(service, http_request.path_params["id"])
    ready = not service.requests.workers.missing() and not service.draining
    await http_request.respond_json({"name": name, "ready": ready}, 200 if ready else 503)


async def health(service: Service, http_request: HttpRequest) -> None:
    """Answer 200, or 503 with stalled, down and missing processes; ``?verbose`` lists every process.

    Based on heartbeats with progress counters; sends no probe request.
    """
    report: MetricsReport | None = None
    silence = ""
    try:
        report = await service.queries.metrics(SUPERVISOR_ANSWERS_S)
    except RequestError as error:
        silence = error.message
    slots = service.requests.workers  # read after the wait, at the same moment as `missing`
    missing = [str(role) for role in slots.missing()]
    unhealthy: list[dict[str, object]] = [
        {"process": str(slot.worker), "state": slot.state.name.lower(), "note": slot.note}
        for slot in slots.unhealthy()
    ]
    if report is None:
        unhealthy.append({"process": "supervisor", "state": "stalled", "note": silence})
    healthy = not unhealthy and not missing
    answer: dict[str, object] = {
        "status": "ok" if healthy else "unhealthy",
        "processes": unhealthy,
        "missing": missing,
    }
    if http_request.has_flag("verbose"):
        answer["all_processes"] = [_process_json(process) for process in (report.processes if report else [])]
    await http_request.respond_json(answer, 200 if healthy else 503)


def _process_json(process: ProcessMetrics) -> dict[str, object]:
    worker = process.worker
    return {
        "process": str(worker),
        "role": str(worker.role),
        "index": worker.index,
        "epoch": worker.epoch,
        "pid": process.pid,
        "state": process.state.name.lower(),
        "uptime_s": round(process.uptime_s, 1),
        "completed": process.progress,
        "pending": process.pending,
        "heartbeat_age_s": round(process.beat_age_s, 2),
        "restarts": process.restarts,
        "cpu_s": round(process.cpu_ns * 1e-9, 2),
        "note": process.note,
    }


async def load(service: Service, http_request: HttpRequest) -> None:
    """Answer with the number of live requests of this frontend."""
    await http_request.respond_json({"server_load": service.requests.num_live})


async def show_version(_service: Service, http_request: HttpRequest) -> None:
    try:
        name = version("quintet")
    except PackageNotFoundError:
        name = "unknown"
    await http_request.respond_json({"version": name})


async def models(service: Service, http_request: HttpRequest) -> None:
    """Answer with the served model names, on one page."""
    names = model_names(service.config.model)
    data = [_model(service, name) for name in names]
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    # Codex, which sends its version, requires this field. Its entries have a format of its own.
    catalogue: dict[str, list[str]] = (
        {} if http_request.query_param("client_version") is None else {"models": []}
    )
    await http_request.respond_json({"object": "list", "data": data, **pages, **catalogue})


async def model(service: Service, http_request: HttpRequest) -> None:
    await http_request.respond_json(_model(service, _served(service, http_request.path_params["id"])))


def _served(service: Service, name: str) -> str:
    """Return the served name, or raise `RequestError`."""
    if f"{name}/" in model_names(service.config.model):
        return f"{name}/"  # a folder: routing stripped its final slash
    check_model(name, service.config.model)
    return name


def _model(service: Service, name: str) -> dict[str, object]:
    """Return a model in the common format of the OpenAI and Anthropic APIs."""
    config = service.config.model
    adapter = next((each for each in config.adapters if each.name == name), None)
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started_at, UTC).isoformat(),
        "owned_by": "quintet",
        "root": config.path if adapter is None else adapter.path,
        "parent": None if adapter is None else config.served_names[0],
        "max_model_len": config.max_model_len,
        "generation_defaults": config.generation_defaults,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": service.started_at,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
