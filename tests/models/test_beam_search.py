"""Beam search against transformers: the same sequences with the same scores, over the logits of the same model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quintet.frontend.beam_search import MAX_WIDTH, Beam, BeamOptions, EarlyStopping, output_limit, search
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import RequestError
from quintet.wire.messages import Alternative, PositionLogprobs, TokenPrompt
from quintet.wire.params import SamplingParams

VOCAB, EOS = 48, (5, 11)
PROMPTS = [[7, 8, 9], [1], [30, 2, 30, 2, 30, 2]]


@cache
def model() -> LlamaForCausalLM:
    """A model with likely ends, so that beams end during the search."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=None,
    )
    found = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        found.lm_head.weight[list(EOS)] *= 1.2
    return found


async def ask(prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[PositionLogprobs]:
    """The engine's part, computed by transformers."""
    return [likely(tuple(unpack_i32(prompt.token_ids)), params.logprobs or 0) for prompt in prompts]


@cache
def likely(ids: tuple[int, ...], count: int) -> PositionLogprobs:
    with torch.inference_mode():
        row = model()(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    values, tokens = row.topk(count)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    top = [Alternative(token, value, f"<{token}>", b"", rank) for rank, (token, value) in enumerate(pairs, 1)]
    return PositionLogprobs(top[0], top, 0)


def found_by(prompts: list[list[int]], options: Sequence[BeamOptions]) -> list[list[Beam]]:
    return asyncio.run(search(prompts, options, ask))


def expected(prompt: list[int], options: BeamOptions) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = model().generate(
            torch.tensor([prompt]),
            num_beams=options.width,
            num_return_sequences=options.width,
            max_new_tokens=options.max_tokens,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            eos_token_id=sorted(options.ends) or None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    if options.width == 1:  # greedy search, which has no scores
        (ids,) = found.sequences.tolist()
        total, length = 0.0, len(ids) - len(prompt)
        for i in range(len(prompt), len(ids)):
            total += {a.token_id: a.logprob for a in likely(tuple(ids[:i]), VOCAB).top}[ids[i]]
        return [(ids[len(prompt) :], total / length**options.length_penalty)]
    answers = []
    for whole, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = whole[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(ids) if token in options.ends), len(ids))
        answers.append((ids[:end], score))
    return answers


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("num_ends", [0, 1, 2])
def test_sequences_and_scores_equal_transformers(
    early: EarlyStopping, penalty: float, width: int, num_ends: int
) -> None:
    """Also several prompts at once, which end in different rounds."""
    ends = frozenset(EOS[:num_ends])
    options = [BeamOptions(width, length, penalty, early, ends) for length in (9, 4, 1)]
    found = found_by(PROMPTS, options)
    for prompt, each, beams in zip(PROMPTS, options, found, strict=True):
        wanted = expected(prompt, each)
        assert [beam.token_ids for beam in beams] == [ids for ids, _ in wanted]
        assert [beam.score for beam in beams] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_beams_end_during_the_search() -> None:
    """Otherwise the comparison would not cover ended beams."""
    options = BeamOptions(5, 9, ends=frozenset(EOS))
    found = found_by(PROMPTS, [options] * 3)
    lengths = {len(beam.token_ids) for beams in found for beam in beams}
    assert len(lengths) > 2 and max(lengths) == 9


def test_log_probabilities_are_of_the_output_tokens() -> None:
    (best, *_), *_ = found_by(PROMPTS[:1], [BeamOptions(3, 5, num_shown=2)])
    assert [position.chosen.token_id for position in best.positions] == best.token_ids
    assert sum(position.chosen.logprob for position in best.positions) == pytest.approx(best.logprob)
    assert {len(position.top) for position in best.positions} == {2}
    offsets = [position.text_offset for position in best.positions]
    texts = [position.chosen.token for position in best.positions]
    assert offsets == [len("".join(texts[:i])) for i in range(len(texts))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "n is 0; it must be between 1 and"),
        ({"width": MAX_WIDTH + 1, "width_field": "best_of"}, "best_of is 33"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"length_penalty": 11.0}, "length_penalty is 11"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"width": 32, "ends": frozenset(range(9))}, "stop_token_ids has so many"),
    ],
)
def test_invalid_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        BeamOptions(**{"width": 2, "max_tokens": 3, **options})  # type: ignore[arg-type]


def test_output_must_fit_after_the_prompt() -> None:
    assert (output_limit(10, 5, 15, "prompt"), output_limit(10, None, 15, "prompt")) == (5, 5)
    for num_prompt, max_tokens, param in ((10, 6, "max_tokens"), (15, None, "prompt"), (16, 1, "prompt")):
        with pytest.raises(RequestError) as raised:
            output_limit(num_prompt, max_tokens, 15, "prompt")
        assert raised.value.param == param
