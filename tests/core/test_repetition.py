"""Repetition detection, incremental and on resumed outputs."""

from __future__ import annotations

import random

import pytest

from quintet.core.requests.repetition import Repetition
from quintet.wire.errors import RequestError
from quintet.wire.messages import FinishReason
from quintet.wire.params import RepetitionDetectionParams, SamplingParams

from .fake import World


def repeats(outputs: list[int], params: RepetitionDetectionParams) -> bool:
    """Reference: search the whole output."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        pattern = outputs[len(outputs) - size :]
        if (
            len(outputs) >= size * params.min_count
            and outputs[-size * params.min_count :] == pattern * params.min_count
        ):
            return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_pattern_is_found_after_min_count(seed: int) -> None:
    draw = random.Random(seed)
    num_found = 0
    for _ in range(300):
        most = draw.randint(1, 6)
        params = RepetitionDetectionParams(
            max_pattern_size=most, min_pattern_size=draw.randint(0, most), min_count=draw.randint(2, 4)
        )
        prompt, outputs = [1] * draw.randint(1, 9), []
        watch = Repetition(params)
        for _ in range(40):
            outputs.append(draw.randint(1, 2))
            found = watch.has_repeated(prompt + outputs, len(prompt))
            assert found == repeats(outputs, params)
            assert Repetition(params).has_repeated(prompt + outputs, len(prompt)) == found, (
                "a second detector over the whole output"
            )
            num_found += found
    assert num_found > 100


def test_repetition_ends_request() -> None:
    watched = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    world = World(slots=2, num_blocks=400, max_steps_in_flight=2)
    for request_id, detection in ((1, None), (2, watched)):
        world.admit(
            request_id, [5, 6, 7], seed=9, max_tokens=400, ignore_eos=True, repetition_detection=detection
        )
    world.run()
    plain, ended = world.outcomes[1], world.outcomes[2]
    twice = next(i for i in range(1, 400) if plain.tokens[i] == plain.tokens[i - 1])
    assert (plain.finish, ended.finish) == (FinishReason.LENGTH, FinishReason.REPETITION)
    assert ended.tokens == plain.tokens[: twice + 1]


def test_invalid_detection_is_rejected() -> None:
    for given in (
        {"max_pattern_size": 129, "min_count": 2},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
    ):
        with pytest.raises(RequestError, match="repetition_detection is"):
            SamplingParams(repetition_detection=RepetitionDetectionParams(**given)).checked()
    with pytest.raises(RequestError, match="min_count at least 2"):
        SamplingParams(
            repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=1)
        ).checked()
    off = SamplingParams(repetition_detection=RepetitionDetectionParams())
    assert off.checked().repetition_detection is None
