"""Builder of one step: collect rows and block changes, then build the `StepPlan` message."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from quintet.core.kv.groups import Groups
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.table_audit import table_checksum
from quintet.wire.codec import encode, pack_i32
from quintet.wire.embeds import num_leading
from quintet.wire.step import NewRow, StepPlan


class StepBuilder(msgspec.Struct):
    """Columns of a step under construction; the scheduler appends to them directly."""

    rows: list[Request] = []
    starts: list[int] = []
    counts: list[int] = []
    samples: bytearray = msgspec.field(default_factory=bytearray)
    new_rows: list[NewRow] = []
    new_row_bytes: int = 0
    blocks: list[int] = []
    """Quadruples ``slot, group, position, block``."""
    copies: list[int] = []
    """Pairs ``from, to``."""
    _origins: dict[int, int] = {}
    """Target block -> source block of its copy."""
    borrowed: list[int] = []
    """One reference per block that must not be overwritten before this step has copied it."""
    swaps_in: list[int] = []
    """Pairs ``device block, host block``."""
    columns: dict[str, Any] = {}
    """Fields of the plan that features attach (`quintet.core.hooks.Attach`)."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the step computes. All copies are simultaneous, so a copy of a copy reads the original source."""
        self._origins[target] = source = self._origins.get(source, source)
        self.copies += (source, target)

    def add_new_row(self, request: Request, groups: Groups) -> None:
        """Send a request that just got its slot, and its block tables."""
        slot = request.slot
        row = NewRow(
            slot=slot,
            generation=request.generation,
            request_id=request.request_id,
            token_ids=pack_i32(request.tokens),
            num_prompt_tokens=request.num_prompt,
            params=request.spec.params,
            seed=request.seed,
            stop_ids=list(request.stops),
            bad_word_ids=request.bad_word_ids,
            num_embedded=num_leading(request.embeds) if request.embeds else 0,
            draft_scope=int.from_bytes(request.salt_digest[:8], "little"),
            adapter=request.spec.adapter,
        )
        self.new_rows.append(row)
        self.new_row_bytes += len(encode(row))
        for index, held in enumerate(request.kv.held):
            if index in groups.states:
                self.blocks += (slot, index, 0, held.blocks[0], slot, index, 1, held.blocks[-1])
                continue
            for position, block in enumerate(held.blocks, held.begin):
                self.blocks += (slot, index, position, block)

    def add(self, request: Request, count: int) -> None:
        """Add a row that computes the next ``count`` tokens, and draws one if none is left."""
        planned = request.planned
        self.rows.append(request)
        self.starts.append(planned)
        self.counts.append(count)
        request.planned = planned + count
        if request.planned == request.length:
            request.length += 1
            self.samples.append(1)
        else:
            self.samples.append(0)

    def finish(self, state: SchedulerState, now_ns: int) -> StepPlan | None:
        """Return the plan and append it to ``state.in_flight``. Return None and change nothing when the step is empty."""
        rows = self.rows
        if not rows and not self.blocks:
            return None
        state.step += 1
        starts, counts = self.starts, self.counts
        for attach in state.attaching:
            attach(state, self)
        samples = bytes(self.samples)
        drafts = self.columns.get("drafts", b"")
        flight = InFlightPlan(
            step=state.step,
            rows=rows,
            generations=[request.generation for request in rows],
            ends=[request.planned for request in rows],
            samples=samples,
            drafts=drafts,
            num_unverified_drafts=[request.num_unverified_drafts for request in rows] if drafts else [],
            counts=counts,
            num_active_slots=len(state.running),
            planned_ns=now_ns,
        )
        checksum = 0
        if state.limits.audit:
            audited = zip(rows, flight.generations, starts, flight.ends, strict=True)
            checksum = table_checksum(audited, state.limits.groups)
        tiers = state.pool.tiers
        swaps_out = tiers.take_copies() if tiers.all else []
        plan = StepPlan(
            step=state.step,
            sent_ns=now_ns,
            freed=pack_i32(state.freed_slots),
            new_rows=self.new_rows,
            blocks=pack_i32(self.blocks),
            copies=pack_i32(self.copies),
            slots=array("i", [request.slot for request in rows]).tobytes(),
            starts=array("i", starts).tobytes(),
            counts=array("i", counts).tobytes(),
            samples=samples,
            checksum=checksum,
            swaps_out=pack_i32(swaps_out),
            swaps_in=pack_i32(self.swaps_in),
            **self.columns,
        )
        if swaps_out or self.swaps_in:
            counters, num_out, num_in = state.counters, len(swaps_out) // 2, len(self.swaps_in) // 2
            counters.swap_out_blocks += num_out
            counters.swap_in_blocks += num_in
            counters.swap_out_bytes += num_out * state.limits.block_bytes
            counters.swap_in_bytes += num_in * state.limits.block_bytes
        state.freed_slots.clear()
        state.in_flight.append(flight)
        state.pool.release(self.borrowed, state.fence)
        return plan
