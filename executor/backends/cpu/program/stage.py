"""What a process computes of a model, recorded: all of its layers, or those of a stage.

Owns the program, its KV memory and rotations, and has the other ranks of the stage run whatever it runs. Knows no plan and no
table: a step is what `quintet.executor.backends.cpu.program.step` describes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.backends.cpu.program.graph_builder import GraphBuilder
from quintet.executor.backends.cpu.program.kv import KvMemory
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.rotations import Rotations
from quintet.executor.distributed.parallel.balancer import Balancer
from quintet.executor.distributed.parallel.expert_copies import ExpertCopies
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks, vector_records
from quintet.executor.embeds import StepEmbeds
from quintet.executor.expert_metrics import ExpertCounts
from quintet.executor.model_config.share import Share, most_outputs
from quintet.executor.models.model import CausalModel
from quintet.wire.config import EngineConfig


class Stage:
    """The recorded layers of one process."""

    def __init__(
        self,
        library: ProgramLibrary,
        model: CausalModel,
        config: EngineConfig,
        dtype: torch.dtype,
        kv: KvMemory,
        share: Share,
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: of a stage that is divided. Rank 0 has the others run whatever it runs; they do what they are told."""
        self.library, self.kv, self.dtype, self.share = library, kv, dtype, share
        self.vocab_size = model.vocab_size
        self.logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
        """Of logits, whichever stage makes them."""
        self._ranks = ranks
        self.max_outputs = most_outputs(config.scheduler)
        self.max_tokens = max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        self.rotations = Rotations(model.ropes, dtype, config.model.max_model_len + 1, ranks)
        recorder = GraphBuilder(library, dtype, kv, self.max_tokens, self.max_outputs, ranks)
        hidden = model.forward(recorder)
        recorder.keep(hidden)
        logits = None
        if share.is_last:
            recorder.mark()
            logits = model.logits(recorder, recorder.take_outputs(hidden))
            if ranks is not None:
                logits = recorder.gather_logits(logits)
            recorder.keep(logits)
        recorded = recorder.finish()
        self.spans = recorded.spans
        self.program = recorder.handle
        self._alive = (model, recorder.memory)  # what the program's addresses point into
        self.end = self.spans[-1].end
        """Behind the last operation: of the logits, where they are made here."""
        self.layers_end = recorded.parts[0] if recorded.parts else self.end
        """Behind the last operation of the layers."""
        self.given = None if recorder.given is None else recorder.given.tensor
        """``[max_tokens, hidden]``: what the stage before has computed; None in the first stage."""
        self.hidden = hidden.tensor
        """``[max_tokens, hidden]``: what the next stage goes on with."""
        self.logits = None if logits is None else logits.tensor
        assert self.logits is None or self.logits.dtype is self.logits_dtype, self.logits.dtype
        """``[max_outputs, vocab]``; None where another stage makes them."""
        self._embedded = None if recorder.embedded is None else recorder.embedded.tensor
        self.embedding_end = self.spans[0].end
        assert self._embedded is None or self.spans[0].name == "embedding", self.spans[0]
        self.seconds = 0.0
        """Time spent in the program so far."""
        eplb = config.executor.eplb
        self._copies = (
            ExpertCopies(recorder.expert_layers, ranks) if ranks is not None and share.places else None
        )
        self._balancer = None
        if self._copies is not None and share.rank == 0 and eplb is not None:
            self._balancer = Balancer(self._copies, eplb)
        self.expert_counts = None
        if recorder.expert_layers:
            counts = [each.asked for each in recorder.expert_layers]
            self.expert_counts = ExpertCounts(counts, recorder.expert_layers[0].homes.ranks, self._copied)

    @property
    def work_done(self) -> int:
        """Pieces of work that the compute threads have done."""
        return int(self.library.pieces_done())

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """See `quintet.executor.runner.Runner.blocks`: of the layers that are here."""
        return [place for place in self.kv.places if place.shape[1]]

    def run(self, step: object, begin: int, end: int, length: int) -> float:
        """Run operations ``[begin, end)`` over a step, with the other ranks; return the seconds it took.

        length: the step's largest position plus 1. What is behind the logits is this process's alone.
        """
        if self._balancer is not None and begin == 0:
            self._balancer.note_step()
        begun = time.perf_counter()
        if self._ranks is not None and begin < self.end:
            self._ranks.tell_run(step, begin, min(end, self.end), length)
        self.library.run(self.program, step, begin, end)
        spent = time.perf_counter() - begun
        self.seconds += spent
        return spent

    @property
    def handed_width(self) -> int:
        """Numbers of a token that a stage hands on to the next: hidden states, and rotations that it could not know."""
        return int(self.hidden.shape[1]) + self.rotations.handed_width

    def hand_on(self, rows: torch.Tensor) -> None:
        """Write them of the step that was run into rows ``[num_tokens, handed_width]``."""
        width = self.hidden.shape[1]
        rows[:, :width].copy_(self.hidden[: len(rows)])
        self.rotations.hand_on(rows[:, width:])

    def take(self, rows: torch.Tensor) -> None:
        """Go on with what the stage before has handed on."""
        assert self.given is not None, self.share
        self.wait_for_ranks()  # who still read the last step's
        width = self.given.shape[1]
        self.given[: len(rows)].copy_(rows[:, :width])
        self.rotations.take(rows[:, width:])

    @property
    def has_chores(self) -> bool:
        """Whether experts are to be copied between ranks, or it is to be found out whether."""
        return self._balancer is not None and self._balancer.has_chores

    def do_chore(self) -> None:
        """Do a piece of that, with the other ranks; nothing where there is nothing to do."""
        if self._balancer is not None:
            self._balancer.do_chore()

    def move_told(self, mail: bytes) -> None:
        """Take part in copying an expert, as rank 0 does."""
        assert self._copies is not None, "experts are copied that have no place to go"
        self._copies.move_told(mail)

    def _copied(self) -> tuple[int, int]:
        return (0, 0) if self._balancer is None else (self._balancer.num_copies, self._balancer.bytes_moved)

    def embed(self, step: object, length: int, embeds: StepEmbeds) -> None:
        """Compute the beginning of a step that brings vectors of its own."""
        assert self._embedded is not None, "another stage has the embedding"
        self.run(step, 0, self.embedding_end, length)
        if self._ranks is not None:
            records = np.zeros(len(embeds.tokens), vector_records(self._embedded.shape[1], self.dtype))
            records["token"], records["vector"] = embeds.tokens, embeds.vectors.contiguous().view(torch.uint8)
            self._ranks.tell_mail(OrderKind.EMBEDS, records.tobytes(), records.itemsize)
        embeds.put(self._embedded)

    def wait_for_ranks(self) -> None:
        """Wait until the other ranks have done what they were told: what they read may be written over."""
        if self._ranks is not None:
            self._ranks.wait_for_all()

    def run_told(self, step: object, begin: int, end: int, length: int) -> None:
        """Run what rank 0 runs, over the step that was heard of; length: its largest position plus 1."""
        assert end <= self.library.size(self.program), (begin, end)
        self.rotations.reach(length)
        self.library.run(self.program, step, begin, end)

    def put_told(self, mail: bytes) -> None:
        """Write vectors over what the embedding made, as rank 0 does."""
        assert self._embedded is not None, "another stage has the embedding"
        records = np.frombuffer(mail, vector_records(self._embedded.shape[1], self.dtype))
        vectors = torch.from_numpy(records["vector"].copy()).view(self.dtype)
        StepEmbeds(torch.from_numpy(records["token"].astype(np.int64)), vectors).put(self._embedded)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `quintet.executor.runner.Runner.copy_blocks`."""
        pairs = torch.stack((sources, targets), 1).to(torch.int32).numpy().tobytes()
        if self._ranks is None:
            self._copy(pairs)
        else:
            self._ranks.move_blocks(OrderKind.COPY_BLOCKS, pairs, self._copy)

    def copy_told(self, mail: bytes) -> None:
        """Copy blocks that an order names, and have the other ranks copy theirs, where this one is the first."""
        if self._ranks is None:
            self._copy(mail)
        elif self._ranks.share.rank == 0:
            self._ranks.move_blocks(OrderKind.COPY_BLOCKS, mail, self._copy)
        else:
            self._copy(mail)
            self._ranks.wait_for_moved()

    def _copy(self, mail: bytes) -> None:
        """Copy those blocks that are this process's to write."""
        turn, pairs = self.share.turn, np.frombuffer(mail, np.int32).reshape(-1, 2).astype(np.int64)
        sources, targets = torch.from_numpy(pairs[pairs[:, 1] % turn.size == turn.index].T.copy())
        for place in self.kv.places:
            place[targets] = place[sources]
