"""Pipeline stages: the payloads of their links, and the first stage's side of a pipeline."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.runner import append_draw
from quintet.executor.backends.cpu.program.step import CStep, Step
from quintet.executor.distributed.parallel.library import Note, StepPart
from quintet.executor.distributed.parallel.ranks import Links, Ranks
from quintet.executor.embeds import embeds_of
from quintet.executor.model_config.share import aux_layers_of
from quintet.executor.ragged import Int
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig


class Handover:
    """Reads and writes the payloads of a stage's links.

        to the next stage     a row per token: hidden states | rotations | observed hidden states
        to the first stage    a row of logits per output; directly after them, a row of observed hidden states per token

    Observed hidden states are those that a draft head in the first stage reads. A stage sends the ones that it received, and
    its own.
    """

    def __init__(self, stage: ModelProgram, aux_layers: Sequence[int]) -> None:
        """aux_layers: numbers of layers of the whole model, ascending, as for the stage's program."""
        self.stage, self._own = stage, stage.aux_hidden
        begin = 0 if stage.share.layers is None else stage.share.layers[0]
        self._num_received = sum(number < begin for number in aux_layers)
        self._observed = stage.aux_hidden
        """Observed hidden states up to this stage; after `take`, those of the step."""
        self._width = int(stage.hidden.shape[1])
        self._widths = [self._width, stage.rotations.handed_width, len(aux_layers) * self._width]

    def take(self, link: Ranks, count: int) -> None:
        """Load ``count`` tokens from the previous stage. Report its order as finished only after `write`."""
        stage, (hidden, rotations, observed) = self.stage, self._columns(link, count)
        assert stage.received_hidden is not None, stage.share
        stage.wait_for_ranks()  # they may still read the last step's
        stage.received_hidden[:count].copy_(hidden)
        stage.rotations.take(rotations)
        self._observed = [*observed.split(self._width, dim=1)[: self._num_received], *self._own]

    def write(self, link: Ranks, count: int) -> None:
        """Write ``count`` tokens of the last step for the next stage."""
        hidden, rotations, observed = self._columns(link, count)
        hidden.copy_(self.stage.hidden[:count])
        self.stage.rotations.write_handover(rotations)
        self._write_observed(observed.split(self._width, dim=1), count)

    def write_result(self, link: Ranks, num_outputs: int, count: int) -> None:
        """In the last stage: write logits, and the observed hidden states of ``count`` tokens, for the first stage."""
        assert self.stage.logits is not None, self.stage.share
        logits, observed = self.result(link, num_outputs)
        logits[:num_outputs].copy_(self.stage.logits[:num_outputs])
        self._write_observed(observed, count)

    def result(self, link: Ranks, num_outputs: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return views of the logits ``[max_outputs, vocab]``, and of each observed hidden state ``[≥ max_tokens, hidden]``.

        The first ``num_outputs`` rows of logits are those of the step.
        """
        stage = self.stage
        logits = link.payload(stage.vocab_size, stage.logits_dtype)[: stage.max_outputs]
        if not self._widths[-1]:
            return logits, ()
        begin = logits[:num_outputs].nbytes
        return logits, link.payload(self._widths[-1], stage.dtype, begin).split(self._width, dim=1)

    def _columns(self, link: Ranks, count: int) -> Sequence[torch.Tensor]:
        rows = link.payload(sum(self._widths), self.stage.dtype)[:count]
        return torch.split(rows, self._widths, dim=1)

    def _write_observed(self, targets: Sequence[torch.Tensor], count: int) -> None:
        """Copy the observed hidden states of ``count`` tokens. The last targets are those of later stages."""
        for target, observed in zip(targets, self._observed, strict=False):
            target[:count].copy_(observed[:count])


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step in flight, or an order for more logits of it."""

    step: Step
    length: int
    """The step's largest position plus 1."""
    number: int
    """Number of the order, from 1."""


class Pipeline:
    """All stages, seen from the first: it sends steps and receives logits in the same order, several steps later.

    It owns the arrays of every step in flight, and draws tokens, because it has the tables. It does not handle requests
    or a plan's deltas.
    """

    def __init__(
        self, stage: ModelProgram, config: EngineConfig, links: Links, span: TraceSpan = no_span
    ) -> None:
        self._stage, self._links, self._span = stage, links, span
        self._handover = Handover(stage, aux_layers_of(config.scheduler))
        self.depth = config.executor.pipeline_parallel_size
        """Maximum number of steps with outstanding logits."""
        self.max_outputs = stage.max_outputs
        self.expert_counts = stage.expert_counts
        """Expert counters of the first stage's layers."""
        self._steps = [
            Step(stage.library, stage.max_tokens, stage.max_outputs) for _ in range(self.depth + 1)
        ]
        for step in self._steps:
            step.c.rotations, step.c.marks = stage.rotations.address, None
        self._draws: dict[int, int] = {}
        """Draw programs by the address of the logits."""
        self._num_steps = self._num_sent = self._num_taken = 0
        self._is_taken = False
        """True if the last taken logits are still being read."""
        self._step_buffer = ctypes.byref(CStep())  # a result contains no step
        links.preceding.done()  # ready

    def wait_for_stages(self) -> None:
        """Wait until all stages have loaded their weights."""
        self._stage.wait_for_ranks()
        self._links.following.wait_for_all()

    @property
    def work_done(self) -> int:
        """Approximate progress counter of all stages' compute threads."""
        return self._stage.work_done + self._links.following.noted(Note.PROGRESS) + self._num_sent

    @property
    def seconds(self) -> float:
        """Time spent in the first stage's program so far."""
        return self._stage.seconds

    @property
    def has_idle_tasks(self) -> bool:
        """True if a stage has idle tasks left."""
        return self._stage.has_idle_tasks or self._links.following.noted(Note.IDLE_TASKS) > 0

    def begin(self, rows: Rows, tables: SlotTables, settings: Settings) -> InFlightStep:
        """Compute the first stage of a step, and send it to the following stages."""
        stage = self._stage
        step = self._steps[self._num_steps % len(self._steps)]
        self._num_steps += 1
        length = step.fill(rows, tables, settings)
        stage.rotations.fill(length, rows, tables)
        embeds, begin = embeds_of(rows, stage.dtype, stage.hidden.device), 0
        if embeds is not None:
            stage.embed(step.address, length, embeds)
            begin = stage.embedding_end
        stage.run(step.address, begin, stage.end, length)
        self._span("layers")
        following, count = self._links.following, step.c.num_tokens
        following.make_room()
        self._span("bubble")
        self._handover.write(following, count)
        return self._send(step, length, StepPart.LAYERS)

    def more_logits(self, flight: InFlightStep, tokens: Int) -> torch.Tensor:
        """Return more logits ``[len(tokens), vocab]`` of the last step, which was already taken; valid until the next call."""
        with flight.step.with_outputs(tokens):
            order = self._send(flight.step, flight.length, StepPart.LOGITS)
        self.wait(order)
        logits, _ = self._receive()
        self.release_logits()
        return logits[: len(tokens)]

    def _send(self, step: Step, length: int, first: StepPart) -> InFlightStep:
        self._links.following.send_run(step.address, first, StepPart.END, length)
        self._num_sent += 1
        return InFlightStep(step, length, self._num_sent)

    def wait(self, flight: InFlightStep) -> None:
        """Wait until the logits have arrived. Any thread may call it."""
        self._links.preceding.wait_for_sent(flight.number)

    def take(self, flight: InFlightStep) -> torch.Tensor:
        """Wait for the oldest step with untaken logits and return them, ``[max_outputs, vocab]``.

        The first stage's `ModelProgram.aux_hidden` is that of the step until the next one begins.
        """
        logits, self._stage.aux_hidden = self._receive()
        return logits

    def _receive(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        assert not self._is_taken, self._num_taken
        preceding = self._links.preceding
        order = preceding.receive(self._step_buffer)
        self._num_taken += 1
        self._is_taken = True
        return self._handover.result(preceding, order.num_outputs)

    def copy_taken(self, flight: InFlightStep, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of a step's taken logits ``[outputs, vocab]``, copy its hidden states too, and release their memory."""
        step, stage = flight.step.c, self._stage
        stage.aux_hidden = [each[: step.num_tokens].clone() for each in stage.aux_hidden]
        copied = logits[: step.num_outputs].clone()
        self.release_logits()
        return copied

    def release_logits(self) -> None:
        """Release the taken logits' memory for reuse; further calls have no effect."""
        if self._is_taken:
            self._is_taken = False
            self._links.preceding.done()

    def drain(self) -> None:
        """Wait for all steps in flight, and discard their logits."""
        self.release_logits()
        while self._num_taken < self._num_sent:
            self._links.preceding.receive(self._step_buffer)
            self._num_taken += 1
            self._links.preceding.done()

    def draw(self, flight: InFlightStep, logits: torch.Tensor, masks: Masks | None) -> bytes:
        """Draw a step's tokens from its logits; return them as int32. The token table holds them too."""
        library, step, address = self._stage.library, flight.step, logits.data_ptr()
        program = self._draws.get(address)
        if program is None:
            program = self._draws[address] = library.new()
            append_draw(library, program, logits, self._stage)
        step.c.masks = None if masks is None else masks.address
        try:
            library.run(program, step.address, 0, library.size(program))
        finally:
            step.c.masks = None
        return step.columns["drawn"][: step.c.num_outputs].tobytes()

    def run_idle_task(self) -> None:
        """Run one idle task on the first stage, and send one to the other stages."""
        self._stage.run_idle_task()
        self._links.following.send_idle_task()
