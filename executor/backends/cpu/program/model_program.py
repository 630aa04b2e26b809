"""Recorded program of one pipeline stage, or of the whole model.

Owns the recorded operations, the KV memory and the rotations. Rank 0 orders the other ranks of the stage to run the same
operations. The program knows no plan and no slot table; its input is a `quintet.executor.backends.cpu.program.step.Step`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.backends.cpu.program.graph_builder import GraphBuilder
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.rotations import Rotations
from quintet.executor.backends.cpu.program.values import Value
from quintet.executor.distributed.parallel.balancer import Balancer, ExpertCopies
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks, vector_records
from quintet.executor.embeds import StepEmbeds
from quintet.executor.expert_metrics import ExpertCounts
from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.share import Share, most_outputs
from quintet.executor.models.draft_heads import observed_forward
from quintet.executor.models.model import CausalModel, PooledModel
from quintet.wire.config import EngineConfig


class ModelProgram:
    """Recorded layers of one process."""

    def __init__(
        self,
        library: ProgramLibrary,
        model: CausalModel,
        config: EngineConfig,
        dtype: torch.dtype,
        kv: KvMemory,
        share: Share,
        ranks: Ranks | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        """ranks: of a tensor-parallel stage. Rank 0 sends orders; the others execute them. aux_layers: see `aux_hidden`."""
        self.library, self.kv, self.dtype, self.share = library, kv, dtype, share
        self.vocab_size = model.vocab_size
        self.logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
        """Dtype of the logits, also in stages that do not compute them."""
        self._ranks = ranks
        self.max_outputs = most_outputs(config.scheduler)
        self.max_tokens = max(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        self.rotations = Rotations(model.ropes, dtype, config.model.max_model_len + 1, ranks)
        builder = GraphBuilder(library, dtype, kv, self.max_tokens, self.max_outputs, ranks)
        hidden, observed = observed_forward(model, builder, aux_layers, are_joined=share.stages == 1)
        builder.keep(hidden, *observed)
        logits = normed = None
        if share.is_last:
            logits, normed = _record_outputs(builder, model, hidden, pools=config.model.pooling is not None)
            builder.keep(logits := logits if ranks is None else builder.gather_logits(logits))
        recorded = builder.finish()
        self.spans = recorded.spans
        self.handle = builder.handle
        self._keep_alive = (model, builder.memory)  # the program holds addresses into these
        self.end = self.spans[-1].end  # of the last operation, which may be that of the logits
        self.layers_end = recorded.parts[0] if recorded.parts else self.end
        self.normed_end = recorded.parts[1] if normed is not None else self.layers_end
        self.received_hidden = None if builder.received_hidden is None else builder.received_hidden.tensor
        """``[max_tokens, hidden]``: hidden states from the previous stage; None in the first stage."""
        self.hidden = hidden.tensor
        """``[max_tokens, hidden]``: hidden states for the next stage."""
        self.aux_hidden: Sequence[torch.Tensor] = [value.tensor for value in observed]
        """``[max_tokens, hidden]`` after each of ``aux_layers``: joined in an only stage; in the first of several, of all."""
        self.normed = None if normed is None else normed.tensor
        """``[max_outputs, hidden]``: outputs after the final norm, if the server pools."""
        self.logits = None if logits is None else logits.tensor
        assert self.logits is None or self.logits.dtype is self.logits_dtype, self.logits.dtype
        """``[max_outputs, vocab]``; None if another stage computes them."""
        self._embedded = None if builder.embedded is None else builder.embedded.tensor
        self.embedding_end = self.spans[0].end
        assert self._embedded is None or self.spans[0].name == "embedding", self.spans[0]
        self.seconds = 0.0  # spent in the program
        eplb = config.executor.eplb
        self._copies = (
            ExpertCopies(builder.expert_layers, ranks) if ranks is not None and share.places else None
        )
        self._balancer = None
        if self._copies is not None and share.rank == 0 and eplb is not None:
            self._balancer = Balancer(self._copies, eplb)
        self.expert_counts = None
        if builder.expert_layers:
            counts = [each.asked for each in builder.expert_layers]
            self.expert_counts = ExpertCounts(counts, builder.expert_layers[0].homes.ranks, self._copied)

    @property
    def work_done(self) -> int:
        """Number of work pieces that the compute threads have finished."""
        return int(self.library.pieces_done())

    def run(self, step: object, begin: int, end: int, length: int) -> float:
        """Run operations ``[begin, end)`` of a step on all ranks; return the elapsed seconds.

        length: the step's largest position plus 1. Operations after the logits run only in this process.
        """
        if self._balancer is not None and begin == 0:
            self._balancer.note_step()
        started = time.perf_counter()
        if self._ranks is not None and begin < self.end:
            self._ranks.send_run(step, begin, min(end, self.end), length)
        self.library.run(self.handle, step, begin, end)
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        return elapsed

    @property
    def has_idle_tasks(self) -> bool:
        """True if expert load balancing has idle work: a decision or a copy between ranks."""
        return self._balancer is not None and self._balancer.has_idle_tasks

    def run_idle_task(self) -> None:
        """Run one part of the expert load balancing on all ranks; no-op if there is none."""
        if self._balancer is not None:
            self._balancer.run_idle_task()

    def move_ordered(self, items: bytes) -> None:
        """Take part in an expert copy that rank 0 ordered."""
        assert self._copies is not None, "an expert copy was ordered, but this stage has no slots for copies"
        self._copies.move_ordered(items)

    def _copied(self) -> tuple[int, int]:
        return (0, 0) if self._balancer is None else (self._balancer.num_copies, self._balancer.bytes_moved)

    def embed(self, step: object, length: int, embeds: StepEmbeds) -> None:
        """Run the embedding of a step with input embeddings and replace the given rows."""
        assert self._embedded is not None, "another stage has the embedding"
        self.run(step, 0, self.embedding_end, length)
        if self._ranks is not None:
            records = np.zeros(len(embeds.tokens), vector_records(self._embedded.shape[1], self.dtype))
            records["token"], records["vector"] = embeds.tokens, embeds.vectors.contiguous().view(torch.uint8)
            self._ranks.send_items(OrderKind.EMBEDS, records.tobytes(), records.itemsize)
        embeds.put(self._embedded)

    def wait_for_ranks(self) -> None:
        """Wait until the other ranks have executed their orders; the memory that they read may then be overwritten."""
        if self._ranks is not None:
            self._ranks.wait_for_all()

    def run_ordered(self, step: object, begin: int, end: int, length: int) -> None:
        """Run the operations that rank 0 ordered. length: the step's largest position plus 1."""
        assert end <= self.library.size(self.handle), (begin, end)
        self.rotations.reach(length)
        self.library.run(self.handle, step, begin, end)

    def put_ordered(self, items: bytes) -> None:
        """Replace rows of the embedding, as rank 0 does."""
        assert self._embedded is not None, "another stage has the embedding"
        records = np.frombuffer(items, vector_records(self._embedded.shape[1], self.dtype))
        vectors = torch.from_numpy(records["vector"].copy()).view(self.dtype)
        StepEmbeds(torch.from_numpy(records["token"].astype(np.int64)), vectors).put(self._embedded)


def _record_outputs(
    builder: GraphBuilder, model: CausalModel, hidden: Value, *, pools: bool
) -> tuple[Value, Value | None]:
    """Record the logits of the outputs; return them, and the outputs after the final norm if they are pooled."""
    builder.mark()
    outputs = builder.take_outputs(hidden)
    if not (pools and isinstance(model, PooledModel)):
        return model.logits(builder, outputs), None
    normed = model.normed(builder, outputs)
    builder.keep(normed)
    builder.mark(is_timed=False)
    return model.logits_of_normed(builder, normed), normed
