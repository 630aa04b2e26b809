"""A worker without a model: deterministic tokens after a fixed time, to test and measure the other processes.

A token depends on the request's seed and its position only, so a repeated request gives the same output. With a
script it depends on the prompt and the position, to test clients that act on answers. Imports no torch.

A script is JSON: ``[{"after": "text of a prompt", "say": "answer"}, …]``. Texts include special tokens, as the chat
template and the model write them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quintet.executor.context import WorkerContext
from quintet.executor.interface import Finished
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.errors import ConfigError
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import RowVector
from quintet.wire.step import NewRow, PromptLogprobs, StepPlan, StepResult, TokenLogprobs

NO_ANSWER = "The script has no answer to this prompt."
TAIL_CHARS = 40
"""The number of an answer's last characters searched in a prompt: chat templates remove reasoning before them."""


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One row of a script."""

    after: str
    """Prompt text that selects this answer: the latest match wins, unless the answer follows it already."""
    say: str


class MockScript:
    """Chooses the tokens of an answer by the text of its prompt."""

    def __init__(self, answers: list[Answer], tokenizer: Tokenizer, end_id: int) -> None:
        self._answers = answers
        self._tokenizer = tokenizer
        self._end_id = end_id

    def answer(self, prompt_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the answer's tokens followed by the end token."""
        prompt = self._tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
        found = [(at, row.say) for row in self._answers if (at := _match_position(row, prompt)) >= 0]
        say = max(found, default=(0, NO_ANSWER), key=lambda each: each[0])[1]
        ids = self._tokenizer.encode(say, add_special_tokens=False).ids
        return np.array([*ids, self._end_id], np.int32)


def _match_position(row: Answer, prompt: str) -> int:
    """Return the last position of a row's text in a prompt; -1 if absent or if the row's answer follows it."""
    at = prompt.rfind(row.after)
    return -1 if at >= 0 and prompt.find(row.say[-TAIL_CHARS:], at + len(row.after)) >= 0 else at


def read_mock_script(path: Path, tokenizer_file: Path, end_id: int) -> MockScript:
    """Read a script and the tokenizer that encodes it. Raises `ConfigError`."""
    try:
        answers = msgspec.json.decode(path.read_bytes(), type=list[Answer])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f'--mock-script {path} cannot be read: {error}; the file must be JSON: [{{"after": "…", "say": "…"}}]'
        ) from error
    return MockScript(answers, Tokenizer.from_file(str(tokenizer_file)), end_id)


_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SEED_MASK = (1 << 64) - 1
_SLEEP_S = 0.2
"""A mock step sleeps at most this many seconds at once and counts progress after each sleep."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MockWorker:
    """Draws plain ids from the upper half of the vocabulary, never an end of sequence."""

    num_split = num_host_blocks = swap_bytes_per_s = 0
    experts = output_cache = None
    has_idle_tasks = False
    kv = None

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: list[int],
        num_blocks: int,
        step_s: float,
        span: TraceSpan = no_span,
        script: MockScript | None = None,
        vector_width: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self._vector_width = vector_width
        self._digests: dict[int, int] = {}
        """Checksums of prompts by slot, if the server pools."""
        self._script = script
        self._answers: dict[int, tuple[int, NDArray[np.int32]]] = {}
        """Scripted answers by slot: the prompt's length, the answer's tokens."""
        self._span = span
        self._step_s = step_s
        self.work_done = 0
        """Sleeps completed so far."""
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._logprob_rows: dict[int, NewRow] = {}
        self._used_slots: set[int] = set()
        self._plain = plain_ids(vocab_size, eos_token_ids)
        self._vocab_size = vocab_size

    @property
    def facts(self) -> Mapping[str, str]:
        """Start-up facts for the log."""
        return {"worker": f"mock, {self._step_s * 1e3:g} ms a step", "blocks": str(self.num_blocks)}

    @property
    def num_active_slots(self) -> int:
        return len(self._used_slots)

    def reset(self) -> None:
        """Remove every row."""
        self._seeds[:] = 0
        self._used_slots.clear()
        self._answers.clear()
        self._logprob_rows.clear()

    def is_broken(self, error: Exception) -> bool:
        """Return False: there is no device."""
        return False

    def run_idle_task(self) -> None:
        """Do nothing: there are no idle tasks."""

    def waits_for(self, plan: StepPlan) -> bool:
        """Return False: a step ends inside `begin`."""
        return False

    def begin(self, plan: StepPlan) -> Finished:
        """Execute the plan and wait for the end of the mock step."""
        return Finished(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Draw for every sampling row, then sleep until the configured step time has passed."""
        deadline = time.perf_counter() + self._step_s
        for slot in np.frombuffer(plan.freed, np.int32).tolist():
            self._used_slots.discard(slot)
            self._answers.pop(slot, None)
            self._logprob_rows.pop(slot, None)
        for row in plan.new_rows:
            self._used_slots.add(row.slot)
            self._seeds[row.slot] = row.seed & SEED_MASK
            if self._vector_width:
                self._digests[row.slot] = zlib.crc32(row.token_ids)
            if self._script is not None:
                self._look_up(self._script, row)
            self._logprob_rows.pop(row.slot, None)
            if row.params.logprobs is not None or row.params.prompt_logprobs is not None:
                self._logprob_rows[row.slot] = row
        slots = np.frombuffer(plan.slots, np.int32)
        ends = np.frombuffer(plan.starts, np.int32) + np.frombuffer(plan.counts, np.int32)
        sampling = np.flatnonzero(np.frombuffer(plan.samples, np.uint8))
        tokens = self._draw(self._seeds[slots[sampling]], ends[sampling])
        if self._answers:
            self._write_answers(slots[sampling], ends[sampling], tokens)
        result = StepResult(plan.step, 0, tokens.tobytes())
        if self._logprob_rows:
            self._mock_logprobs(plan, slots, sampling, tokens, result)
        for each in plan.pooled_rows:
            if ends[each.row] == each.num_prompt_tokens:
                result.vectors.append(RowVector(each.row, self._vector(int(slots[each.row]))))
        while (remaining := deadline - time.perf_counter()) > 0:
            time.sleep(min(remaining, _SLEEP_S))
            self.work_done += 1
        self._span("layers", plan.step)
        return result

    def _draw(self, seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a plain id for each seed and position."""
        drawn: NDArray[np.int32] = self._plain[_mixed(seeds, positions) % np.uint64(len(self._plain))]
        return drawn

    def _vector(self, slot: int) -> bytes:
        """Return a vector that depends on the prompt only, with components between -1 and 1."""
        seeds = np.full(self._vector_width, self._digests[slot], np.uint64)
        mixed = _mixed(seeds, np.arange(self._vector_width, dtype=np.int32))
        vector: NDArray[np.float32] = (mixed.astype(np.float64) / (1 << 63) - 1).astype(np.float32)
        return vector.tobytes()

    def _look_up(self, script: MockScript, row: NewRow) -> None:
        """Find the answer to a request that enters a slot."""
        prompt_ids = np.frombuffer(row.token_ids, np.int32)[: row.num_prompt_tokens]
        self._answers[row.slot] = row.num_prompt_tokens, script.answer(prompt_ids)

    def _write_answers(
        self, slots: NDArray[np.int32], ends: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        """Write the scripted tokens of sampling rows over the drawn ones; after an answer, repeat its end token."""
        for index, slot in enumerate(slots.tolist()):
            if slot in self._answers:
                num_prompt_tokens, answer = self._answers[slot]
                tokens[index] = answer[min(int(ends[index]) - num_prompt_tokens, len(answer) - 1)]

    def _mock_logprobs(
        self,
        plan: StepPlan,
        slots: NDArray[np.int32],
        sampling: NDArray[np.intp],
        tokens: NDArray[np.int32],
        result: StepResult,
    ) -> None:
        """Fill in log-probabilities of the right shape: -0.5 for the drawn token, then descending by 1."""
        for index, row_index in enumerate(sampling.tolist()):
            row = self._logprob_rows.get(int(slots[row_index]))
            if row is not None and row.params.logprobs is not None:
                ids, logprobs = self._alternatives(int(tokens[index]), row.params)
                result.logprobs.append(TokenLogprobs(row_index, 1, ids.tobytes(), logprobs.tobytes()))
        starts, counts = np.frombuffer(plan.starts, np.int32), np.frombuffer(plan.counts, np.int32)
        for row_index, slot in enumerate(slots.tolist()):
            row = self._logprob_rows.get(slot)
            if row is None or row.params.prompt_logprobs is None:
                continue
            first = int(starts[row_index]) + 1
            last = min(int(starts[row_index] + counts[row_index]) + 1, row.num_prompt_tokens)
            if first < last:
                result.prompt_logprobs.append(self._prompt_alternatives(row_index, row, first, last))

    def _prompt_alternatives(self, row_index: int, row: NewRow, first: int, last: int) -> PromptLogprobs:
        width = 1 + self._num_alternatives(row.params.prompt_logprobs or 0)
        prompt = np.frombuffer(row.token_ids, np.int32)[first:last]
        ids = np.concatenate(
            (
                prompt[:, None],
                np.broadcast_to(np.arange(width - 1, dtype=np.int32), (len(prompt), width - 1)),
            ),
            1,
        )
        logprobs = np.broadcast_to(-0.5 - np.arange(width, dtype=np.float32), ids.shape)
        ranks = np.ones(len(prompt), np.int32)
        return PromptLogprobs(row_index, first, width, ranks.tobytes(), ids.tobytes(), logprobs.tobytes())

    def _num_alternatives(self, requested: int) -> int:
        return self._vocab_size if requested < 0 else min(requested, self._vocab_size)

    def _alternatives(
        self, token: int, params: SamplingParams
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        others = np.arange(self._num_alternatives(params.logprobs or 0), dtype=np.int32)
        if len(others):
            others[0] = token
        ids = np.concatenate((np.array([token], np.int32), others))
        logprobs = np.concatenate(([-0.5], -0.5 - np.arange(len(others)))).astype(np.float32)
        return ids, logprobs


def _mixed(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Mix seed and position (SplitMix64's finalizer, Steele, Lea and Flood 2014)."""
    z = seeds + positions.astype(np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def plain_ids(vocab_size: int, eos_token_ids: list[int]) -> NDArray[np.int32]:
    """Return the ids that the mock may draw: ordinary words in every common vocabulary.

    Special tokens and single bytes are first or last in a vocabulary. The ids between 1/2 and 15/16 of it are merged
    words. Raises `ConfigError` if none remains.
    """
    ids = np.arange(vocab_size // 2, max(vocab_size // 2 + 1, vocab_size * 15 // 16), dtype=np.int32)
    plain = np.setdiff1d(ids, np.array(eos_token_ids, np.int32))
    if not len(plain):
        raise ConfigError(f"vocab_size is {vocab_size}; the mock executor needs at least one plain token id")
    return plain


def make_worker(context: WorkerContext) -> MockWorker:
    """See `quintet.executor.backends.registry.Backend`."""
    config, script = context.config, None
    if config.executor.mock_script is not None:
        tokenizer_file = Path(config.model.tokenizer_path) / "tokenizer.json"
        end_id = config.model.eos_token_ids[0]
        script = read_mock_script(Path(config.executor.mock_script), tokenizer_file, end_id)
    return MockWorker(
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=config.model.vocab_size,
        eos_token_ids=config.model.eos_token_ids,
        num_blocks=config.model.kv.num_blocks(config.cache.memory_bytes),
        step_s=config.executor.step_ms * 1e-3,
        span=context.span,
        script=script,
        vector_width=0 if config.model.pooling is None else config.model.pooling.width,
    )
