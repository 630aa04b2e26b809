"""Log-probabilities of drawn and of prompt tokens, from the raw logits before any processing."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import ranges
from quintet.executor.runner import LogitsSource
from quintet.executor.sampling.logits_processor import Int
from quintet.executor.sampling.ops import SamplingOps
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.step import NewRow, PromptLogprobs, TokenLogprobs


class Logprobs:
    """Log-probability parameters per slot. Entries hold the token itself first, then the most likely ones."""

    def __init__(self, max_num_seqs: int, ops: SamplingOps) -> None:
        self._ops = ops
        self._num_top = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_top = np.zeros(max_num_seqs, np.int64)
        self._chosen_ids: dict[int, Int] = {}

    def admit_output(self, row: NewRow) -> bool:
        """Store the request's parameters for drawn tokens; return whether it has any."""
        params = row.params
        self._chosen_ids.pop(row.slot, None)
        if params.logprob_token_ids:
            self._chosen_ids[row.slot] = np.array(params.logprob_token_ids, np.int64)
        self._num_top[row.slot] = params.logprobs or 0
        return params.logprobs is not None or bool(params.logprob_token_ids)

    def admit_prompt(self, row: NewRow) -> bool:
        """Store the request's parameters for prompt tokens; return whether it has any."""
        self._num_prompt_top[row.slot] = row.params.prompt_logprobs or 0
        return row.params.prompt_logprobs is not None

    def of_drawn(
        self, logits: torch.Tensor, drawn: torch.Tensor, slots: Int, which: Int, row_numbers: Int
    ) -> list[TokenLogprobs]:
        """Return log-probabilities for the rows ``which`` of ``logits [S, vocab]`` and ``drawn [S]``.

        ``slots`` are of all S rows; ``row_numbers`` are their indexes in the plan. A request with
        ``logprob_token_ids`` gets those tokens instead of the most likely ones.
        """
        own = drawn if len(which) == len(drawn) else drawn[to_device(which, logits.device)]
        num_top = self._num_top[slots[which]]
        found = self._ops.entries(logits, own, int(num_top.max()), which)
        reports: list[TokenLogprobs] = []
        for i, slot in enumerate(slots[which].tolist()):
            width = 1 + int(num_top[i])
            row_ids, row_values = found.ids[i, :width], found.values[i, :width]
            chosen = self._chosen_ids.get(slot)
            if chosen is not None:
                of_chosen = logits[int(which[i])][to_device(chosen, logits.device)].double().cpu().numpy()
                requested = (of_chosen - found.normalizers[i]).astype(np.float32)
                order = np.argsort(-requested, kind="stable")
                row_ids = np.concatenate((row_ids[:1], chosen[order].astype(np.int32)))
                row_values = np.concatenate((row_values[:1], requested[order]))
            reports.append(
                TokenLogprobs(
                    int(row_numbers[which[i]]),
                    int(found.ranks[i]),
                    row_ids.tobytes(),
                    row_values.tobytes(),
                )
            )
        return reports

    def of_prompt(
        self, rows: Rows, which: Int, tables: SlotTables, runner: LogitsSource
    ) -> list[PromptLogprobs]:
        """Return log-probabilities of the prompt tokens after this step's positions, of the rows ``which``.

        The previous step covered the first token of a chunk, so entries of successive chunks join without a gap.
        """
        slots, firsts = rows.slots[which], rows.starts[which] + 1
        counts = np.minimum(firsts + rows.counts[which], tables.num_prompt_tokens[slots]) - firsts
        which, slots, firsts = which[counts > 0], slots[counts > 0], firsts[counts > 0]
        counts = counts[counts > 0]
        if not len(which):
            return []
        owners, positions = ranges(firsts, counts)
        _, at = ranges(rows.offsets[which], counts)
        width = int(self._num_prompt_top[slots].max())
        chunks = []
        for begin in range(0, len(at), runner.max_outputs):
            chunk = slice(begin, begin + runner.max_outputs)
            own = tables.token_ids[
                to_device(slots[owners[chunk]], tables.device),
                to_device(positions[chunk].copy(), tables.device),
            ]
            found = self._ops.entries(runner.logits(at[chunk]), own, width, None)
            chunks.append((found.ids, found.values, found.ranks))
        ids, values, ranks = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        ends = np.cumsum(counts)
        reports: list[PromptLogprobs] = []
        for i, row in enumerate(which.tolist()):
            mine = slice(int(ends[i] - counts[i]), int(ends[i]))
            row_width = 1 + int(self._num_prompt_top[slots[i]])
            reports.append(
                PromptLogprobs(
                    row,
                    int(firsts[i]),
                    row_width,
                    ranks[mine].tobytes(),
                    ids[mine, :row_width].tobytes(),
                    values[mine, :row_width].tobytes(),
                )
            )
        return reports
