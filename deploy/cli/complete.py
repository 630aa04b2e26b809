"""``quintet complete``: completes a text with a running server."""

from __future__ import annotations

import argparse
import contextlib
import sys

from quintet.deploy.cli.chat import add_client_arguments, replace_undecodable, sampling_of
from quintet.deploy.tools.load_client.talk import Client, ServerError

_DEFAULT_MAX_TOKENS = 128
_EXAMPLES = """\
examples:
  quintet complete "def fibonacci(n):"
  quintet complete --echo --temperature 0 --max-tokens 40 "import os"
  head -20 draft.py | quintet complete > rest.py      text from a pipe; prints only the completion
  quintet complete --stop "\\n\\n" "class Stack:"       (in bash: --stop $'\\n\\n')
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "complete",
        description="Stream a completion from a running server with an OpenAI-compatible API.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", nargs="?", help="text to complete (default: standard input)")
    add_client_arguments(parser)
    parser.add_argument("--echo", action="store_true", help="print the text before its completion")


def run(arguments: argparse.Namespace) -> int:
    """Print the completion; return the exit status."""
    if arguments.text is None and sys.stdin.isatty():
        print('quintet complete: no text given; use e.g. quintet complete "def add(a, b):"', file=sys.stderr)
        return 2
    replace_undecodable(arguments)
    text = sys.stdin.read() if arguments.text is None else arguments.text
    try:
        client = Client.of(arguments.url, arguments.api_key)
        body = {"max_tokens": _DEFAULT_MAX_TOKENS, **sampling_of(arguments)}
        body |= {"model": arguments.model or client.first_model(), "prompt": text}
        deltas = client.stream("/v1/completions", body)
        with contextlib.closing(deltas):
            if arguments.echo:
                print(text, end="", flush=True)
            for delta in deltas:
                print(delta.text, end="", flush=True)
    except ServerError as error:
        print(f"quintet complete: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    if sys.stdout.isatty():
        print()
    return 0
