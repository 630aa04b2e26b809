"""``quintet chat``: terminal chat with a running server."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys

from quintet.deploy.tools.load_client.talk import Client, ListedModel, ServerError, Speed, TextDelta

_EXAMPLES = """\
examples:
  quintet serve &                                     start a server, then
  quintet chat                                        chat with it
  quintet chat --url http://gpu-box:8000 --system "Answer in one sentence."
  git diff | quintet chat --system "Review this."     one message from a pipe, one response

while chatting:
  /system TEXT   change the system prompt and start over    /reset   clear the conversation
  /quit          exit (or Ctrl-D)                           Ctrl-C   stop the response, keep its text
"""

SAMPLING = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Sampling parameters that the model's generation config does not set."""
MAX_ANSWER_TOKENS = 1024

_HELP = "/system TEXT  /reset  /quit; Ctrl-C stops a response"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        description="Chat with a running server with an OpenAI-compatible API.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_client_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="top-p sampling (default: the model's, else 0.95)"
    )


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments shared by terminal clients."""
    parser.add_argument(
        "--url",
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="server URL (default: %(default)s)",
    )
    parser.add_argument("--model", help="model name (default: the first one that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="API key, if the server requires one")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: the model's, else 0.7 in chat)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of output tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop string; repeat for more")


def sampling_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the request fields set by the shared arguments."""
    fields = {
        "temperature": arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "stop": arguments.stop,
    }
    return {name: value for name, value in fields.items() if value is not None}


def replace_undecodable(arguments: argparse.Namespace) -> None:
    """Replace bytes that are not text by U+FFFD, in the arguments and in what is read from standard input.

    Python keeps such bytes of arguments as surrogates, which a request cannot contain.
    """
    for name, value in vars(arguments).items():
        if isinstance(value, str):
            setattr(arguments, name, _without_surrogates(value))
        elif isinstance(value, list):
            setattr(arguments, name, [_without_surrogates(each) for each in value])
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _without_surrogates(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def run(arguments: argparse.Namespace) -> int:
    """Chat until the user exits; return the exit status."""
    replace_undecodable(arguments)
    try:
        client = Client.of(arguments.url, arguments.api_key)
        model = client.listed_model(arguments.model)
        fields = chat_defaults(model) | sampling_of(arguments)
        if arguments.top_p is not None:
            fields["top_p"] = arguments.top_p
        chat = Chat(client, {"model": model.id, **fields}, arguments.system)
        if not sys.stdin.isatty():
            chat.send(sys.stdin.read())
            return 0
        print(f"{model.id} at {arguments.url}. {_HELP}")
        return _converse(chat)
    except ServerError as error:
        print(f"quintet chat: {error}", file=sys.stderr)
        return 1


def chat_defaults(model: ListedModel) -> dict[str, object]:
    """Return sampling parameters that neither the user nor the model sets.

    With the API's defaults (temperature 1, no limit), small models ramble. ``min_p`` is sent only to servers that list
    generation defaults, because others may reject it.
    """
    model_defaults = model.generation_defaults
    fields: dict[str, object] = {"max_tokens": MAX_ANSWER_TOKENS}
    for name, value in SAMPLING.items():
        if name not in (model_defaults or {}) and (model_defaults is not None or name != "min_p"):
            fields[name] = value
    return fields


def _converse(chat: Chat) -> int:
    with contextlib.suppress(ImportError):  # some Python builds lack it
        import readline  # noqa: F401 - enables line editing in `input`
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D exits)")
            continue
        command, _, rest = line.partition(" ")
        if command in {"/quit", "/exit"}:
            return 0
        if command == "/reset":
            chat.reset()
            print("(conversation cleared)")
        elif command == "/system":
            chat.reset(rest.strip())
            print(
                "(new system prompt, new conversation)"
                if rest.strip()
                else "(no system prompt, new conversation)"
            )
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            _send(chat, line)


def _send(chat: Chat, line: str) -> None:
    try:
        speed = chat.send(line).text()
        print(f"({speed})" if speed else "(no text)")
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(" (stopped)")


class Chat:
    def __init__(self, client: Client, fields: dict[str, object], system: str | None) -> None:
        self._client = client
        self._fields = fields
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start over, with another system prompt if given (empty text for none)."""
        if system is not None:
            self._system = system
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def send(self, text: str) -> Speed:
        """Send a message, print the streamed response, and return its speed.

        The conversation keeps a partial response without its reasoning, and drops a message without a response.
        """
        self._messages.append({"role": "user", "content": text})
        contents: list[str] = []
        speed = Speed()
        body = {**self._fields, "messages": self._messages, "stream_options": {"include_usage": True}}
        response = self._client.stream("/v1/chat/completions", body, speed)
        try:
            with contextlib.closing(response):
                was_reasoning = False
                for delta in response:
                    if was_reasoning and not delta.is_reasoning:
                        print("\n", file=sys.stderr, flush=True)
                    was_reasoning = delta.is_reasoning
                    if not delta.is_reasoning:
                        contents.append(delta.text)
                    _print(delta)
            print()
        finally:
            if contents:
                self._messages.append({"role": "assistant", "content": "".join(contents)})
            else:
                self._messages.pop()
        return speed


def _print(delta: TextDelta) -> None:
    """Print content on standard output, and reasoning on standard error, dim on a terminal."""
    if not delta.is_reasoning:
        print(delta.text, end="", flush=True)
    elif sys.stderr.isatty():
        print(f"\x1b[2m{delta.text}\x1b[22m", end="", file=sys.stderr, flush=True)
    else:
        print(delta.text, end="", file=sys.stderr, flush=True)
