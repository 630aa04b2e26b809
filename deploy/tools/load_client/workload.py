"""Workload generation from a seed: prompts (random, with a shared prefix, or from a file) and arrival times."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("/v1/completions", "/v1/chat/completions")

_WORD_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
WORDS = tuple(_WORD_TEXT.split())
"""Common English words of about one token each in most vocabularies."""


class BadWorkload(ValueError):
    """The workload is invalid; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    num_prompts: int
    input_len: int
    """Length in tokens; approximate without ``vocab_size``, by ``words_per_token``."""
    shared_prefix_len: int = 0
    vocab_size: int | None = None
    """Upper bound of random token ids; None sends words instead."""
    words_per_token: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One request: a prompt as text, token ids or conversation, and the output length."""

    prompt: str | list[int] | None = None
    messages: msgspec.Raw | None = None
    output_len: int | None = None


class _Line(msgspec.Struct):
    """One line of a prompts file."""

    prompt: str | list[int] | None = None
    prompt_token_ids: list[int] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    output_len: int | None = None
    max_tokens: int | None = None


class _Message(msgspec.Struct):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Common fields of all requests of a run."""

    endpoint: Endpoint
    model: str
    output_len: int
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: Mapping[str, msgspec.Raw] = field(default_factory=dict)

    def body(self, item: Item) -> bytes:
        """Return the JSON body of one request.

        Raises `BadWorkload` if the endpoint does not support the kind of prompt.
        """
        body: dict[str, object] = {"model": self.model}
        if self.endpoint == "/v1/completions":
            if item.prompt is None:
                raise BadWorkload("prompts with `messages` require --endpoint /v1/chat/completions")
            body["prompt"] = item.prompt
        elif item.messages is not None:
            body["messages"] = item.messages
        elif isinstance(item.prompt, str):
            body["messages"] = [_Message("user", item.prompt)]
        else:
            raise BadWorkload("prompts as token ids require --endpoint /v1/completions")
        body["max_tokens"] = item.output_len or self.output_len
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        body.update(self.extra_body)
        return msgspec.json.encode(body)


def random_prompts(spec: PromptSpec) -> list[Item]:
    """Generate prompts, deterministic for a given spec."""
    if spec.input_len < 1:
        raise BadWorkload(f"--input-len is {spec.input_len}; it must be at least 1")
    if not 0 <= spec.shared_prefix_len <= spec.input_len:
        raise BadWorkload(
            f"--shared-prefix-len is {spec.shared_prefix_len}; it must be between 0 and --input-len ({spec.input_len})"
        )
    rng = random.Random(spec.seed)
    if spec.vocab_size is not None:
        vocab_size, own_len = spec.vocab_size, spec.input_len - spec.shared_prefix_len
        prefix = [rng.randrange(vocab_size) for _ in range(spec.shared_prefix_len)]
        return [
            Item(prefix + [rng.randrange(vocab_size) for _ in range(own_len)])
            for _ in range(spec.num_prompts)
        ]
    num_words = max(1, round(spec.input_len * spec.words_per_token))
    num_shared = min(num_words, round(spec.shared_prefix_len * spec.words_per_token))
    shared = rng.choices(WORDS, k=num_shared)
    return [
        Item(" ".join(shared + rng.choices(WORDS, k=num_words - num_shared))) for _ in range(spec.num_prompts)
    ]


def read_prompts(path: Path, num_prompts: int | None) -> list[Item]:
    """Read a JSON-lines file of ``{"prompt": …}``, ``{"prompt_token_ids": …}`` or ``{"messages": …}``.

    Lines may contain ``max_tokens`` (or ``output_len``). The file is repeated if ``num_prompts`` exceeds its lines.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadWorkload(f"--prompts {path}: {error.strerror}") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise BadWorkload(f"{path}:{number}: {error}") from None
        prompt = row.prompt if row.prompt is not None else row.prompt_token_ids
        messages = row.messages if bytes(row.messages) else None
        if prompt is None and messages is None:
            raise BadWorkload(
                f"{path}:{number}: the line must contain `prompt`, `prompt_token_ids` or `messages`"
            )
        items.append(Item(prompt, messages, row.output_len or row.max_tokens))
    if not items:
        raise BadWorkload(f"{path} contains no prompts")
    wanted = len(items) if num_prompts is None else num_prompts
    return (items * math.ceil(wanted / len(items)))[:wanted]


def poisson_arrivals(num: int, rate_per_s: float, seed: int) -> Sequence[float]:
    """Return arrival times in seconds from the start, with exponential gaps, deterministic for a seed."""
    rng = random.Random(f"arrivals-{seed}")
    times, now_s = [], 0.0
    for _ in range(num):
        times.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return times
