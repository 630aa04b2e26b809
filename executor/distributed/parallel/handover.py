"""Payloads of the links between pipeline stages.

    to the next stage     a row per token: hidden states | rotations | observed hidden states
    to the first stage    a row of logits per output; directly after them, a row of observed hidden states per token

Observed hidden states are those that a draft head in the first stage reads. A stage sends the ones that it received, and its
own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.distributed.parallel.ranks import Ranks


class Handover:
    """Reads and writes the payloads of a stage's links."""

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
