"""Adapters over HTTP: the model name of a request selects one, and responses repeat it."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tests.frontend.configs import make_config
from tests.http_api.conftest import Server

from quintet.wire.messages import Submit
from quintet.wire.model_files import AdapterConfig

SQL, PIRATE = (
    AdapterConfig(name=name, path=f"/adapters/{name}", digest=name.encode()) for name in ("sql", "pirate")
)
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two adapters."""
    server = Server(make_config(str(tmp_path_factory.mktemp("run")), adapters=[SQL, PIRATE]), {})
    yield server
    server.stop()


def last_adapter(server: Server) -> bytes:
    return server.engine.wait_for(Submit)[-1].spec.adapter


def test_openai_client(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        models = {each.id: each for each in client.models.list().data}
        assert [*models] == ["toy", "toy-alias", "sql", "pirate"]
        assert client.models.retrieve("sql").to_dict()["parent"] == "toy"
        assert (
            models["toy"].to_dict()["parent"] is None and models["sql"].to_dict()["root"] == "/adapters/sql"
        )
        answer = client.chat.completions.create(model="sql", messages=CHAT["messages"], max_tokens=2)  # type: ignore[call-overload]
        assert answer.model == "sql" and last_adapter(server) == SQL.digest


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"n": 2, "use_beam_search": True, "temperature": 0}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ],
)
@pytest.mark.parametrize(
    ("model", "named", "digest"), [("pirate", "pirate", PIRATE.digest), ("toy", "toy", b""), ("", "toy", b"")]
)
def test_every_api(
    server: Server, path: str, body: dict[str, Any], model: str, named: str, digest: bytes
) -> None:
    reply = server.ask("POST", path, body | {"model": model})
    assert reply.status == 200, reply.json
    assert reply.json["model"] == named and last_adapter(server) == digest


def test_streams(server: Server) -> None:
    reply = server.ask("POST", "/v1/chat/completions", CHAT | {"model": "sql", "stream": True})
    assert {event["model"] for event in reply.events} == {"sql"}


@pytest.mark.parametrize(("model", "named"), [("sql", "sql"), ("toy-alias", "toy"), (None, "toy")])
def test_render_and_derender(server: Server, model: str | None, named: str) -> None:
    chat = CHAT | {"model": model}
    rendered = server.ask("POST", "/v1/chat/completions/render", chat).json
    assert rendered["model"] == named
    generated = server.ask("POST", "/inference/v1/generate", rendered).json
    assert last_adapter(server) == (SQL.digest if model == "sql" else b"")
    completion = server.ask("POST", "/v1/completions/render", {"prompt": "x", "model": model}).json
    assert [each["model"] for each in completion] == [named]
    for path, body in (
        ("/v1/chat/completions/derender", {"generate_response": generated}),
        ("/v1/completions/derender", {"generate_responses": [generated]}),
    ):
        assert server.ask("POST", path, body | {"model": model}).json["model"] == named


def test_unknown_names(server: Server) -> None:
    reply = server.ask("POST", "/v1/chat/completions", CHAT | {"model": "other"})
    assert reply.status == 404
    assert reply.json["error"]["message"].endswith("This server serves `toy`, `toy-alias`, `sql`, `pirate`.")
