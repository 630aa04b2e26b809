"""Sampling parameters: the one struct that clients, the core, the sampler and the detokenizer share.

Names and defaults are those of vLLM's ``SamplingParams``, so that existing scripts work unchanged. Ranges are vLLM's where it
has one. A range is part of a field's type: msgspec enforces it when a process decodes a message, `SamplingParams.checked`
reports it to clients, and the OpenAPI document shows it.

The tokenizer process derives `ThinkingBound`, the reasoning budget in token ids, from ``thinking_token_budget``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from quintet.wire.errors import RequestError, invalid
from quintet.wire.structured import StructuredOutputsParams


class Thinking(msgspec.Struct, array_like=True):
    """One kind of reasoning: its opening mark, and the tokens that are forced once the budget is used up."""

    opens: list[int]
    forced: list[int]


class ThinkingBound(msgspec.Struct, array_like=True):
    """Reasoning budget of a request."""

    max_tokens: int
    """Between the marks, neither counted."""
    formats: list[Thinking]
    closes: list[list[int]]
    """Token sequences that end reasoning, for every kind."""
    open_format: int | None = None
    """Index of the kind that the prompt has opened; None where the output starts outside reasoning."""

    @property
    def is_valid(self) -> bool:
        """True when the fields are valid."""
        return (
            self.max_tokens >= 0
            and bool(self.formats)
            and all(way.opens and way.forced for way in self.formats)
            and all(self.closes)
            and (self.open_format is None or 0 <= self.open_format < len(self.formats))
        )

    def ids(self) -> Iterator[int]:
        """Yield every token id in it."""
        for way in self.formats:
            yield from way.opens
            yield from way.forced
        for close in self.closes:
            yield from close


MAX_CHOICES = 16_384
MAX_COUNT = (1 << 31) - 1
"""Maximum token count in any field: counts are sent as int32."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings together: each is searched in every new text."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 1024
MAX_SHOWN = 100
"""Maximum characters of a client's value in an error message."""
MAX_LOGPROB_IDS = 128
MAX_PATTERN = 128
"""Maximum pattern size of repetition detection: each size is checked with every token."""
GREEDY_BELOW = 1e-5
GREEDY_VALUES: Mapping[str, float] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Temperature and filters where the most likely token is taken."""
MIN_TEMPERATURE = 0.01

Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[
    float,
    Meta(ge=1e-3, le=1e3, extra={"allowed": "a finite number greater than 0: between 0.001 and 1000"}),
]
"""Logits are multiplied by it in float32, which must not overflow."""


StopString = Annotated[str, Meta(min_length=1)]


def _count(least: int, allowed: str = "") -> Meta:
    """Return the range of a token count from ``least`` on. ``allowed`` describes it, if ``least`` has a meaning of its own."""
    text = f"{allowed or f'at least {least}'} and at most {MAX_COUNT}"
    return Meta(ge=least, le=MAX_COUNT, extra={"allowed": text})


class OutputKind(IntEnum):
    """Contents of each output of the Python API."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, array_like=True, kw_only=True):
    """Repetition detection: a pattern of this size, repeated this often in a row, ends the request."""

    max_pattern_size: int = 0
    """0 disables detection."""
    min_pattern_size: int = 0
    """0 means 1."""
    min_count: int = 0

    @property
    def is_valid(self) -> bool:
        """True when the values are in range."""
        sizes_fit = (
            0 <= self.min_pattern_size <= self.max_pattern_size and 1 <= self.max_pattern_size <= MAX_PATTERN
        )
        return sizes_fit and 2 <= self.min_count <= MAX_COUNT


class SamplingParams(msgspec.Struct, array_like=True, kw_only=True, omit_defaults=True):
    """Parameters that select the output of one request and its end.

    Call `checked` before use: it validates every field and returns the normal form that processes exchange (greedy
    spelled one way, -1 turned into None, and so on).
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, _count(-1, "a positive integer, or 0 or -1 to consider every token,")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: (
        Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1, extra={"allowed": "a 64-bit integer"})] | None
    ) = None
    stop: list[StopString] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, _count(0)] = 0
    max_tokens: Annotated[int, _count(1)] | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool = False
    truncate_prompt_tokens: Annotated[int, _count(-1, "-1 for the model's limit, or at least 1")] | None = (
        None
    )
    truncation_side: str = "left"
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: Annotated[int, _count(-1, "-1 for no limit, or at least 0")] | None = None
    """Maximum reasoning tokens; None or -1 for no limit."""
    thinking_bound: ThinkingBound | None = None
    """The same for the executor. Set by the tokenizer process."""

    def end_tokens(self, eos_token_ids: Iterable[int]) -> dict[int, bool]:
        """Return the tokens that end the output: True for those that the request names."""
        ends = {} if self.ignore_eos else dict.fromkeys(eos_token_ids, False)
        return dict.fromkeys([*ends, *self.stop_token_ids], True) | ends

    @property
    def text_params(self) -> dict[str, Any]:
        """Parameters that the detokenizer needs: fields of `quintet.wire.messages.Open` with the same names."""
        return {name: getattr(self, name) for name in TEXT_PARAMS}

    @property
    def reads_prefix_cache(self) -> bool:
        """The request may reuse cached prefixes. False with prompt log-probabilities, which need every position."""
        return not self.skip_reading_prefix_cache and self.prompt_logprobs is None

    @property
    def greedy(self) -> bool:
        """The most likely token is taken at every position."""
        return self.temperature < GREEDY_BELOW

    def checked(self, max_logprobs: int | None = 20, vocab_size: int | None = None) -> SamplingParams:
        """Return the normal form of these parameters.

        Raises `RequestError` naming the first field that is out of range, its value and the allowed range.
        """
        _check_ranges(self)
        _check_lists(self, max_logprobs, vocab_size)
        changes: dict[str, Any] = {}
        if self.greedy:
            if self.n > 1:
                raise _bad("n", self.n, "1 when temperature is 0: greedy choices would all be the same")
            changes = dict(GREEDY_VALUES)
        elif self.temperature < MIN_TEMPERATURE:
            changes["temperature"] = MIN_TEMPERATURE
        if self.logprob_token_ids and self.logprobs is None:
            changes["logprobs"] = 0
        unlimited: dict[str, int | None] = {"top_k": 0, "seed": None, "thinking_token_budget": None}
        if vocab_size is not None:
            unlimited |= {"logprobs": vocab_size, "prompt_logprobs": vocab_size}
        changes |= {name: value for name, value in unlimited.items() if getattr(self, name) == -1}
        if self.logit_bias:
            changes["logit_bias"] = {t: min(100.0, max(-100.0, b)) for t, b in self.logit_bias.items()}
        watched = self.repetition_detection
        if watched is not None and watched.max_pattern_size == 0:
            changes["repetition_detection"] = None
        elif watched is not None and not watched.is_valid:
            raise _bad(
                "repetition_detection",
                msgspec.structs.asdict(watched),
                f"max_pattern_size between 1 and {MAX_PATTERN} (or 0 to disable detection), min_pattern_size at most that, and "
                "min_count at least 2",
            )
        if self.structured_outputs is not None:
            changes["structured_outputs"] = self.structured_outputs.checked()
        return msgspec.structs.replace(self, **changes) if changes else self


TEXT_PARAMS = "stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "min_tokens"
"""Parameters of `SamplingParams.text_params`."""
PARAMS_WITHOUT_PROCESSOR = {
    *("n", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "output_kind", "skip_reading_prefix_cache"),
    *("truncate_prompt_tokens", "truncation_side", "spaces_between_special_tokens", *GREEDY_VALUES),
    *TEXT_PARAMS,
} - {"min_tokens"}
"""Parameters that no logits processor reads. A request that sets only these is admitted without a call of each."""


def _ranges() -> Iterator[tuple[str, Meta]]:
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            for bounds in getattr(part, "__metadata__", ()):
                if bounds.min_length is None:
                    yield name, bounds


RANGES: Mapping[str, Meta] = dict(_ranges())
"""Ranges of the numeric parameters, by name."""

_LIMITS = [
    (name, bounds.ge if bounds.gt is None else math.nextafter(bounds.gt, math.inf), bounds.le)
    for name, bounds in RANGES.items()
]
_limited_of = attrgetter(*RANGES)


def out_of_range(name: str, value: object) -> RequestError:
    """Build the error for a parameter that is not in its range."""
    bounds = RANGES[name]
    lower = f"between {bounds.ge} and" if bounds.ge is not None else f"greater than {bounds.gt} and at most"
    return _bad(name, value, (bounds.extra or {}).get("allowed") or f"{lower} {bounds.le}")


def first_unknown(ids: Collection[int], vocab_size: int) -> int | None:
    """Return the first of these ids that is out of the vocabulary; None if all are in it."""
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return None
    return next(token for token in ids if not 0 <= token < vocab_size)


def check_token_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise `RequestError` if one of these ids is out of the vocabulary."""
    wrong = first_unknown(ids, vocab_size)
    if wrong is not None:
        raise invalid(
            f"{field} holds the token id {shown(wrong)}; ids must be between 0 and {vocab_size - 1}.",
            field,
        )


def shown(value: object) -> str:
    """Return a client's value for an error message: printable and of bounded length."""
    try:
        text = repr(value[:MAX_SHOWN] if isinstance(value, str | list) else value)
    except ValueError:
        return "a number with too many digits to show"
    is_cut = len(text) > MAX_SHOWN or (isinstance(value, str | list) and len(value) > MAX_SHOWN)
    return text[: MAX_SHOWN - 3] + "..." if is_cut else text


def _bad(field: str, value: object, allowed: str) -> RequestError:
    return invalid(f"{field} is {shown(value)}; it must be {allowed}.", field)


def _check_ranges(p: SamplingParams) -> None:
    for (name, least, most), value in zip(_LIMITS, _limited_of(p), strict=True):
        if value is not None and not least <= value <= most:
            raise out_of_range(name, value)
    if p.truncate_prompt_tokens == 0:
        raise out_of_range("truncate_prompt_tokens", 0)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _bad("min_tokens", p.min_tokens, f"at most max_tokens, which is {p.max_tokens}")
    if p.thinking_bound is not None:
        raise _bad("thinking_bound", "set", "absent: the server sets it")
    if p.truncation_side not in ("left", "right"):
        raise _bad("truncation_side", p.truncation_side, "'left' or 'right'")


def _check_lists(p: SamplingParams, max_logprobs: int | None, vocab_size: int | None) -> None:
    for field, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if value is None:
            continue
        may_be_all = max_logprobs is None
        most, limit_name = MAX_COUNT if max_logprobs is None else max_logprobs, "the server's --max-logprobs"
        if vocab_size is not None and vocab_size <= most:
            most, limit_name, may_be_all = vocab_size, "the vocabulary size", True
        if not 0 <= value <= most and not (value == -1 and may_be_all):
            all_of_them = " or -1 for all of them" if may_be_all else ""
            raise _bad(field, value, f"between 0 and {most} ({limit_name}){all_of_them}")
    if p.stop:
        _check_stop(p)
    if p.bad_words:
        _check_bad_words(p.bad_words)
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise _bad("allowed_token_ids", [], "a non-empty list, or absent")
    if p.logprob_token_ids is not None and len(p.logprob_token_ids) > MAX_LOGPROB_IDS:
        raise _bad("logprob_token_ids", f"{len(p.logprob_token_ids)} ids", f"at most {MAX_LOGPROB_IDS} ids")
    if p.logit_bias and not all(math.isfinite(bias) for bias in p.logit_bias.values()):
        raise _bad("logit_bias", "not finite", "a map from token id to a number between -100 and 100")
    ids_by_field: tuple[tuple[str, Any], ...] = (
        ("stop_token_ids", p.stop_token_ids),
        ("allowed_token_ids", p.allowed_token_ids),
        ("logprob_token_ids", p.logprob_token_ids),
        ("logit_bias", p.logit_bias),
    )
    for field, ids in ids_by_field:
        if not ids:
            continue
        if vocab_size is not None and len(ids) > vocab_size:
            raise _bad(field, f"{len(ids)} ids", f"at most {vocab_size} ids, as many as there are tokens")
        unknown = first_unknown(ids, MAX_COUNT if vocab_size is None else vocab_size)
        if unknown is not None:
            limit = "a token id" if vocab_size is None else f"a token id between 0 and {vocab_size - 1}"
            raise _bad(field, unknown, limit)


def _check_stop(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOP_STRINGS:
        raise _bad("stop", f"{len(p.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    if (num_chars := sum(map(len, p.stop))) > MAX_STOP_CHARS:
        raise _bad("stop", f"{num_chars} characters", f"at most {MAX_STOP_CHARS} characters in all")
    if "" in p.stop:
        raise _bad("stop", p.stop, "a list of non-empty strings")
    if not p.detokenize:
        raise _bad("stop", p.stop, "empty when detokenize is false: stop strings are searched in text")


def _check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise _bad("bad_words", f"{len(words)} words", f"at most {MAX_BAD_WORDS} words")
    if any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise _bad("bad_words", words, f"a list of words of at most {MAX_BAD_WORD_CHARS} characters each")
    if "" in words:
        raise _bad("bad_words", words, "a list of non-empty strings")


def seed_of_choice(seed: int, choice: int) -> int:
    """Return the RNG key of one of a request's ``n`` choices.

    Choice 0 keeps the request's own seed, so that ``n=1`` and the first of ``n`` draw alike. The mixing step is
    SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mask = (1 << 64) - 1
    if choice == 0:
        return seed & mask
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
