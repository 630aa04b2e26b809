"""``quintet chat``: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from quintet.deploy.tools.load_client.talk import Client, ListedModel, ServerError, Speed

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  quintet serve &                                     first a server, then
  quintet chat                                        talk to it
  quintet chat --url http://gpu-box:8000 --system "Answer in one sentence."
  git diff | quintet chat --system "Review this."     one message from a pipe, one answer, done

while chatting:
  /system TEXT   change the instructions and start over     /reset   forget the conversation
  /quit          leave (Ctrl-D too)                         Ctrl-C   stop the answer, keep what was said
"""

SAMPLING = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Of a conversation where the model's generation configuration does not say."""
MAX_ANSWER_TOKENS = 1024

_HELP = "/system TEXT  /reset  /quit; Ctrl-C stops an answer"


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server in the terminal",
        description="Talk to a running server (of any make that speaks OpenAI's API), token by token.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_client_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions that open the conversation")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="nucleus sampling (default: the model's own, else 0.95)"
    )


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the terminal clients share."""
    parser.add_argument(
        "--url",
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    parser.add_argument("--model", help="model name (default: the first the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="key, if the server wants one")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is deterministic (default: the model's own; else 0.7 in chat)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end where this text begins; repeatable"
    )


def sampling_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the body fields that the shared arguments set."""
    fields = {
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "stop": arguments.stop,
    }
    return {name: value for name, value in fields.items() if value is not None}


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user leaves; return the exit status."""
    try:
        client = Client.of(arguments.url, arguments.api_key)
        model = client.listed_model(arguments.model)
        fields = chat_defaults(model) | sampling_of(arguments)
        if arguments.top_p is not None:
            fields["top_p"] = arguments.top_p
        chat = Chat(client, {"model": model.id, **fields}, arguments.system)
        if not sys.stdin.isatty():
            chat.say(sys.stdin.read())
            return 0
        print(f"{model.id} at {arguments.url}. {_HELP}")
        return _converse(chat)
    except ServerError as error:
        print(f"quintet chat: {error}", file=sys.stderr)
        return 1


def chat_defaults(model: ListedModel) -> dict[str, object]:
    """Return the sampling parameters of a conversation where neither the user nor the model sets them.

    The API's defaults (temperature 1, no limit) make small models ramble. ``min_p`` is sent to servers that list generation
    defaults only: others may refuse it.
    """
    own = model.generation_defaults
    fields: dict[str, object] = {"max_tokens": MAX_ANSWER_TOKENS}
    for name, value in SAMPLING.items():
        if name not in (own or {}) and (own is not None or name != "min_p"):
            fields[name] = value
    return fields


def _converse(chat: Chat) -> int:
    with contextlib.suppress(ImportError):  # absent from some builds of Python; then without history
        import readline  # noqa: F401 - importing it gives `input` its editing keys
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")
            continue
        command, _, rest = line.partition(" ")
        if command in {"/quit", "/exit"}:
            return 0
        if command == "/reset":
            chat.reset()
            print("(forgotten)")
        elif command == "/system":
            chat.reset(rest.strip())
            print(
                "(new instructions, new conversation)"
                if rest.strip()
                else "(no instructions, new conversation)"
            )
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            _say_aloud(chat, line)


def _say_aloud(chat: Chat, line: str) -> None:
    try:
        speed = chat.say(line).text()
        print(f"({speed})" if speed else "(no text)")
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(" (stopped)")


class Chat:
    """A conversation so far."""

    def __init__(self, client: Client, fields: dict[str, object], system: str | None) -> None:
        self._client = client
        self._fields = fields
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start over, with other instructions if given (empty text for none)."""
        if system is not None:
            self._system = system
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> Speed:
        """Send a message and print the answer as it comes; return how fast it came.

        An answer that is broken off stays in the conversation as far as it came; a message that was refused does not.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        speed = Speed()
        body = {**self._fields, "messages": self._messages, "stream_options": {"include_usage": True}}
        answer = self._client.stream("/v1/chat/completions", body, speed)
        try:
            with contextlib.closing(answer):
                for piece in answer:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            print()
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()
        return speed
