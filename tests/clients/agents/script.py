"""Script of the model for each program: tool calls, then a final response."""

from __future__ import annotations

from pathlib import Path

from tests.clients.agents.model import Turn, call

NOTES = "a\nb\nc\n"
GREETING = 'goodbye\nworld <b> "q" é\n'
PATCH = '*** Begin Patch\n*** Add File: patched.txt\n+hello "q" é\n*** End Patch\n'
CODE = 'text((await tools.exec_command({cmd: "echo ninety-nine"})).output)'


def script_of(project: Path) -> list[Turn]:
    """Return the whole script. project: folder in which the programs run; it holds ``notes.txt``."""
    notes, greeting = str(project / "notes.txt"), str(project / "greeting.txt")
    return [
        # Claude Code
        Turn(
            "count the lines of notes.txt",
            "<think>\nI look.\n</think>\n\nI count them.\n"
            + call("Bash", {"command": "wc -l notes.txt", "description": "Count lines"}),
        ),
        Turn(
            "3 notes.txt", "<think>\nThree.\n</think>\n\nThe file notes.txt has exactly 3 lines, I counted."
        ),
        Turn(
            "write a greeting",
            call("ToolSearch", {"query": "select:NotebookEdit,WebFetch"})
            + "\n"
            + call("Bash", {"command": "echo twenty-one", "description": "Print a number"}),
        ),
        Turn(
            "twenty-one\n",
            call("Write", {"file_path": greeting, "content": GREETING.replace("goodbye", "hello")}),
        ),
        Turn(
            "created successfully",
            call("Edit", {"file_path": greeting, "old_string": "hello", "new_string": "goodbye"}),
        ),
        Turn(
            "has been updated",
            call("Read", {"file_path": greeting}) + "\n" + call("Read", {"file_path": notes}),
        ),
        Turn(
            "1\tgoodbye",
            call(
                "Agent",
                {"description": "ask", "prompt": "SUBTASK, please", "subagent_type": "general-purpose"},
            ),
        ),
        Turn("SUBTASK, please", "The subagent answers with the number 99."),
        Turn("The subagent answers with the number 99.", "The greeting is written, read and counted."),
        # Codex CLI
        Turn(
            "how many lines has notes.txt",
            "<think>\nI look.\n</think>\n\nI count them.\n"
            + call("exec_command", {"cmd": "wc -l notes.txt"}),
        ),
        Turn(
            "patch this folder",
            call("apply_patch", {"input": PATCH}) + "\n" + call("exec_command", {"cmd": "echo forty-two"}),
        ),
        Turn("forty-two\n", "The patch was applied to this folder."),
        Turn("orchestrate it", call("functions__exec", {"input": CODE})),
        Turn("ninety-nine\n", "The script in JavaScript printed its number."),
        # Vercel's AI SDK, the JDK's HttpClient, Open WebUI
        Turn("Weather in Oslo?", "<think>\nI look.\n</think>\n\n" + call("weather", {"city": "Oslo"})),
        Turn("Fine in Oslo", "It is fine in Oslo."),
        Turn("</chat_history>", '{"title": "Weather of Oslo"}'),
    ]
