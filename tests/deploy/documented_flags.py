"""docs/vllm-flags.md, made of the tables that read such command lines: ``python -m tests.deploy.documented_flags`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quintet.deploy.config import vllm_flags as flags

PAGE = Path(__file__).parents[2] / "docs" / "vllm-flags.md"
_HEAD = """# Flags of vLLM

A command line written for `vllm serve` is read by `quintet serve`, as are a YAML file and the arguments of `LLM`. This page
says what becomes of each flag (names of vLLM 0.33, and of older versions). A switch has a form with `--no-`. Flags that have no
meaning here are accepted, and a line of the log says so. One that would change what the server does, and cannot here, is refused
with what to use instead; a value that says what is so anyway (`0`, `1`, `none`, `auto`, `false`) is accepted.

Short forms: {short}. Numbers of tokens may be written `8k` (8000), `8K` (8192) or `auto`; `--dtype half` is `float16`.

| Flag | What becomes of it |
|---|---|
"""


def rows() -> Iterator[tuple[str, str]]:
    """Yield every flag, and what becomes of it."""
    yield from ((key, "taken") for key in flags.TAKEN)
    yield from (
        (key, f"taken as {'the opposite of ' if new.convert else ''}`{flags.option(new.ours)}`")
        for key, new in flags.RENAMED.items()
    )
    yield from ((key, "taken as a part of `--hf-overrides`") for key in flags.ROPE)
    for table, words in (
        (flags.ACCEPTED_SWITCHES, "accepted"),
        (flags.ACCEPTED_VALUES, "accepted"),
        (flags.REFUSED_SWITCHES, "refused"),
        (flags.REFUSED_VALUES, "refused"),
    ):
        yield from ((key, f"{words}: {why}") for key, why in table.items())


def page() -> str:
    """Return the whole page."""
    short = ", ".join(f"`{word}` ({flags.option(key)})" for word, key in flags.SHORT.items())
    lines = [f"| `{flags.option(key)}` | {fate} |" for key, fate in sorted(rows())]
    return _HEAD.format(short=short) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
