"""Published agent programs against a real server with a scripted model.

Only the forward pass is a mock; HTTP, chat template, tokenizer, prefix cache and parsers are real. ``make clients`` installs the
programs. They can reach only this server.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.agents.model import make_model, write_script
from tests.clients.agents.script import GREETING, NOTES, script_of
from tests.clients.test_packages import ENVIRONMENTS, HERE
from tests.processes.server import Server, serve

MODEL = "agent"
CATALOGUED = ("gpt-5.5", "gpt-6.1-sol")
"""Model names for which Codex CLI sends a freeform tool, and its tools as an item."""
NAMES = [flag for name in (MODEL, *CATALOGUED) for flag in ("--served-model-name", name)]
MIN_HIT_RATE = 0.95
"""Minimum cached share of the previous prompt in the next turn."""
CLOSED_PROXY = "http://127.0.0.1:9"
TIMEOUT_S = 120

pytestmark = pytest.mark.whole


class Setup(NamedTuple):
    """A server, and the folders of its client program."""

    server: Server
    project: Path
    home: Path


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("agents")
    project, home = folder / "project", folder / "home"
    project.mkdir()
    home.mkdir()
    (project / "notes.txt").write_text(NOTES)
    model = make_model(folder / "model")
    script = write_script(folder / "script.json", script_of(project))
    mock = ("--executor", "mock", "--mock-script", str(script), "--kv-cache-memory", "1GiB")
    with serve(str(model), *mock, *NAMES) as server:
        yield Setup(server, project, home)
        assert not [line for line in server.lines if "ERROR" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def toy() -> Iterator[Server]:
    with serve("--dtype", "float32") as server:
        yield server


def installed(name: str) -> Path:
    """Return the folder of a program that npm installed."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    path = ENVIRONMENTS / name
    assert (path / "installed").exists(), f"{path} is missing; `make clients` makes it"
    return path


def run(setup: Setup, *command: str | Path, **variables: str) -> str:
    """Run a program without access to other servers; return its stdout."""
    proxies = {"HTTP_PROXY": CLOSED_PROXY, "HTTPS_PROXY": CLOSED_PROXY, "NO_PROXY": "127.0.0.1"}
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(setup.home),
        "TERM": "dumb",
        **proxies,
        **variables,
    }
    ran = subprocess.run(
        command,
        cwd=setup.project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def events_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def check_hits(usages: list[tuple[int, int]]) -> None:
    """Check the cache hits of each turn. usages: prompt tokens and cached tokens of each request."""
    assert len(usages) >= 2, usages
    for (before, _), (_, cached) in itertools.pairwise(usages):
        assert cached >= MIN_HIT_RATE * before, usages


# --- Claude Code --------------------------------------------------------------------------------------------------


def claude(setup: Setup, prompt: str, *flags: str) -> list[dict[str, Any]]:
    """Send a prompt to Claude Code; return its events."""
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    off = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_AUTOUPDATER",
    )
    allowed = ("--permission-mode", "acceptEdits", "--allowedTools", "Bash,Read,Write,Edit,Agent")
    (program,) = installed("claude_code").glob("node_modules/@anthropic-ai/claude-code-*/claude")
    printed = run(
        setup,
        program,
        *("-p", prompt, "--output-format", "stream-json", "--verbose", *allowed, *flags),
        ANTHROPIC_BASE_URL=setup.server.url,
        ANTHROPIC_API_KEY="unused",
        **dict.fromkeys(names, MODEL),
        **dict.fromkeys(off, "1"),
    )
    return events_of(printed)


def blocks_of(events: list[dict[str, Any]], sender: str, kind: str) -> list[dict[str, Any]]:
    messages = [event["message"] for event in events if event["type"] == sender]
    return [block for message in messages for block in message["content"] if block["type"] == kind]


def prompts_of(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return prompt tokens and cached tokens of each request."""
    usages = {}
    for event in events:
        if event["type"] == "assistant" and event.get("parent_tool_use_id") is None:
            usage = event["message"]["usage"]
            cached = usage["cache_read_input_tokens"]
            usages[event["message"]["id"]] = (usage["input_tokens"] + cached, cached)
    return list(usages.values())


def test_claude_code_calls_a_tool_and_continues_its_conversation(agents: Setup) -> None:
    events = claude(agents, "count the lines of notes.txt")
    (call,) = blocks_of(events, "assistant", "tool_use")
    (result,) = blocks_of(events, "user", "tool_result")
    assert call["input"]["command"] == "wc -l notes.txt" and result["tool_use_id"] == call["id"]
    assert len(blocks_of(events, "assistant", "thinking")) == 2
    assert events[-1]["result"] == "The file notes.txt has exactly 3 lines, I counted."
    assert events[-1]["is_error"] is False
    check_hits(prompts_of(events))
    more = claude(agents, "Again: count the lines of notes.txt", "--continue")
    assert more[-1]["result"] == events[-1]["result"] and len(more) > 3
    check_hits([*prompts_of(events)[-1:], *prompts_of(more)])


def test_claude_code_edits_files_and_calls_a_subagent(agents: Setup) -> None:
    events = claude(agents, "write a greeting")
    called = [block["name"] for block in blocks_of(events, "assistant", "tool_use")]
    assert called == ["ToolSearch", "Bash", "Write", "Edit", "Read", "Read", "Agent"]
    assert not any(block.get("is_error") for block in blocks_of(events, "user", "tool_result"))
    assert (agents.project / "greeting.txt").read_text() == GREETING
    said = [block["text"] for block in blocks_of(events, "assistant", "text")]
    assert "The subagent answers with the number 99." in said
    assert events[-1]["result"] == "The greeting is written, read and counted."
    check_hits(prompts_of(events)[:5])


# --- Codex CLI ----------------------------------------------------------------------------------------------------


def codex(setup: Setup, prompt: str, model: str = MODEL, *more: str) -> list[dict[str, Any]]:
    """Send a prompt to Codex CLI; return its events."""
    home = setup.home / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f"""
        model_provider = "quintet"
        check_for_update_on_startup = false
        [analytics]
        enabled = false
        [model_providers.quintet]
        name = "Quintet"
        base_url = "{setup.server.url}/v1"
        wire_api = "responses"
        """
    )
    flags = ("--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", model)
    program = installed("codex") / "node_modules/.bin/codex"
    return events_of(run(setup, program, "exec", *flags, *more, prompt))


def completed(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def tokens_of(setup: Setup, thread: str) -> list[tuple[int, int]]:
    """Return prompt tokens and cached tokens of each request of a thread, from Codex's rollout file."""
    (rollout,) = (setup.home / ".codex" / "sessions").rglob(f"*{thread}.jsonl")
    notes = [event["payload"] for event in events_of(rollout.read_text()) if event["type"] == "event_msg"]
    usages = [note["info"]["last_token_usage"] for note in notes if note["type"] == "token_count"]
    return [(usage["input_tokens"], usage["cached_input_tokens"]) for usage in usages]


def test_codex_runs_a_command_and_resumes_its_thread(agents: Setup) -> None:
    events = codex(agents, "how many lines has notes.txt")
    (command,) = completed(events, "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("3 notes.txt\n", 0)
    answer = "The file notes.txt has exactly 3 lines, I counted."
    assert [item["text"] for item in completed(events, "agent_message")] == ["I count them.", answer]
    thread = events[0]["thread_id"]
    more = codex(agents, "Once more: how many lines has notes.txt", MODEL, "resume", thread)
    assert completed(more, "agent_message")[-1]["text"] == answer
    check_hits(tokens_of(agents, thread))


def test_codex_applies_a_patch_of_a_freeform_tool(agents: Setup) -> None:
    events = codex(agents, "patch this folder", CATALOGUED[0])
    (change,) = completed(events, "file_change")
    assert change["status"] == "completed"
    assert (agents.project / "patched.txt").read_text() == 'hello "q" é\n'
    assert completed(events, "agent_message")[-1]["text"] == "The patch was applied to this folder."
    check_hits(tokens_of(agents, events[0]["thread_id"]))


def test_codex_sends_its_tools_as_an_item(agents: Setup) -> None:
    events = codex(agents, "orchestrate it", CATALOGUED[1])
    (command,) = completed(events, "command_execution")
    assert command["aggregated_output"] == "ninety-nine\n"
    assert completed(events, "agent_message")[-1]["text"] == "The script in JavaScript printed its number."
    check_hits(tokens_of(agents, events[0]["thread_id"]))


# --- others -------------------------------------------------------------------------------------------------------


def test_ai_sdk_calls_a_tool_over_each_api(agents: Setup, toy: Server) -> None:
    program = shutil.copy(HERE / "agents" / "ai_sdk.mjs", installed("ai_sdk"))
    node = shutil.which("node")
    assert node is not None
    print(run(agents, node, program, agents.server.url, MODEL, toy.url, "quintet-toy"))


def test_jdk_client_calls_a_tool_with_and_without_an_upgrade(agents: Setup) -> None:
    java = shutil.which("java")
    if java is None or shutil.which("javac") is None:
        pytest.skip("no JDK is installed")
    print(run(agents, java, HERE / "agents" / "JdkHttpClient.java", agents.server.url, MODEL))


def test_open_webui_calls_a_tool_and_continues_its_chat(agents: Setup) -> None:
    python = ENVIRONMENTS / "open_webui" / "bin" / "python"
    assert python.exists(), f"{python} is missing; `make clients` makes it"
    printed = run(agents, python, HERE / "agents" / "open_webui.py", agents.server.url, MODEL)
    usages = json.loads(printed.splitlines()[-1])
    assert len(usages) == 4, usages
    check_hits(usages)
