"""Entry point of ``quintet``: selects a command and imports only its module."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from quintet.process.os_tuning import open_standard_streams
from quintet.wire.errors import EXIT_CONFIG, ConfigError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("quintet.deploy.cli.serve", "serve a model over HTTP"),
    "chat": ("quintet.deploy.cli.chat", "chat with a running server in the terminal"),
    "complete": ("quintet.deploy.cli.complete", "complete a text with a running server"),
    "plan": (
        "quintet.deploy.cli.plan",
        "show the resolved configuration and memory of `serve`, without starting it",
    ),
    "convert": (
        "quintet.deploy.cli.convert",
        "convert pytorch_model.bin or a GGUF file to safetensors",
    ),
    "quantize": (
        "quintet.deploy.cli.quantize",
        "quantize a model to GGUF or compressed-tensors",
    ),
    "bench": ("quintet.deploy.cli.bench", "benchmark a server, or the engine without HTTP"),
    "trace": ("quintet.deploy.cli.trace", "analyze a trace: time per step in every process"),
    "route": ("quintet.deploy.cli.route", "load balancer for several servers"),
    "admin": ("quintet.deploy.cli.admin", "show and change the processes of a running server"),
    "replay": ("quintet.deploy.cli.replay", "replay a recording on one process"),
    "collect-env": (
        "quintet.deploy.cli.collect_env",
        "describe this machine and installation, for bug reports",
    ),
}
"""Command -> module and one-line help."""

_EXAMPLES = """\
first steps:
  quintet serve smollm2                serve SmolLM2-135M-Instruct on http://127.0.0.1:8000 (93 MB, downloaded once)
  quintet chat                         chat with it
  quintet serve ./my-model --port 80   serve a local folder
  quintet serve Qwen/Qwen3-0.6B        serve a model of the hub
  quintet plan Qwen/Qwen3-0.6B         show its memory needs

`quintet COMMAND --help` explains each command.
"""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command; suggests the nearest flag for an unknown one."""

    def parse_known_args(  # type: ignore[override]  # argparse's overloads; a command accepts no unknown arguments
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, also vLLM's spellings; exit with a suggestion at the first unknown argument."""
        from quintet.deploy.cli.flag_words import declared_words  # a command that is not run imports nothing

        words = sys.argv[1:] if args is None else args
        known, unknown = super().parse_known_args(
            declared_words(words, self._option_string_actions), namespace
        )
        if unknown:
            from quintet.deploy.config.sglang_flags import flag_for

            close = difflib.get_close_matches(
                unknown[0].split("=")[0], self._option_string_actions, n=1, cutoff=0.7
            )
            nearest = flag_for(unknown[0])
            if nearest != "MODEL" and nearest not in self._option_string_actions:
                nearest = next(iter(close), None)
            self.error(
                f"unrecognized argument: {unknown[0]}" + (f"; did you mean {nearest}?" if nearest else "")
            )
        return known, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Match names with one dash exactly, or with a number: argparse takes ``-t 8`` for ``-tp 8``."""
        is_exact = not option_string.startswith("--") and not option_string[2:3].isdigit()
        return [] if is_exact else super()._get_option_tuples(option_string)


class _ShowVersion(argparse.Action):
    """Prints the version; looks it up lazily, which saves a tenth of the startup time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"quintet {version('quintet')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A `ConfigError` becomes one line and exit status 78."""
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words.insert(0, "serve")  # arguments written for the entry point of vLLM's container image
    chosen = words[0] if words else None
    parser = _parser(chosen)
    if not words:
        parser.print_help()
        return 0
    arguments = parser.parse_args(words)
    try:
        exit_status = import_module(COMMANDS[arguments.command][0]).run(arguments)
    except ConfigError as error:
        print(f"quintet: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe
        return 141
    assert isinstance(exit_status, int), f"{arguments.command} returned {exit_status!r}"
    return exit_status


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Declare all commands by name, and the flags of the chosen one."""
    parser = argparse.ArgumentParser(
        prog="quintet",
        description="Serve large language models: five kinds of process, one command.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for name, (module, summary) in COMMANDS.items():
        if name == chosen:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
