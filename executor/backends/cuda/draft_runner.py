"""Steps of a draft model on a device, over the served model's slot tables, for `quintet.executor.speculation.draft_model`.

The draft model has its own KV memory and graphs. Its steps run on the same stream, between those of the served model,
and the host waits for their tokens. A plan's changes are not on the device while its drafts are proposed, so the first
step applies those that it needs. The served model's step applies them again.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from quintet.executor.backends.cuda.ops.tables import StagingLayout, pack_staging
from quintet.executor.backends.cuda.runner import Drawn
from quintet.executor.backends.cuda.steps import DeviceSteps
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.step import StepPlan


class DraftRunner:
    """Implements `quintet.executor.runner.Runner`. Steps read the device's tables; drawn tokens are written to the host's too."""

    def __init__(self, steps: DeviceSteps, group: int) -> None:
        """steps: of the draft model. group: of the served model; the draft model uses its blocks."""
        self.steps, self._group = steps, group
        runner = steps.runner
        self.max_outputs = runner.max_draws
        self._layout = StagingLayout.of(runner.tables, runner.pool.num_blocks)
        self._changes: StepPlan | None = None
        """The newest plan, if it changes tables of the device that no step has applied yet."""
        self._drawn: tuple[Int, Drawn] | None = None
        """Draws of the last step, and their tokens' indices."""
        self.work_done = 0

    def note(self, plan: StepPlan) -> None:
        """Note the newest plan, before drafts for its rows. All plans before it are on the device."""
        self._changes = plan if plan.new_rows or plan.blocks else None

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`. Also draws from the unmodified logits, as graphs do; the caller draws again."""
        self._drawn = rows.draw_tokens, self._launch(rows.plan)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `LogitsSource`. tokens: those before the draws of the last step."""
        assert self._drawn is not None and np.array_equal(tokens, self._drawn[0]), tokens
        return self._drawn[1].logits[: len(tokens)]

    def normed(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.pooling.HiddenSource`."""
        return self.steps.runner.normed(tokens)

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes:
        """See `Runner.forward_and_draw`. The sampling settings are on the device. Waits for the tokens."""
        assert masks is None, "drafts are drawn without masks"
        drawn = self._launch(rows.plan).tokens[: len(rows.sampling)].cpu().numpy()
        tables.token_ids.numpy()[rows.slots[rows.sampling], rows.draw_positions] = drawn
        return drawn.astype(np.int32).tobytes()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Drawn:
        plan, steps = self._with_changes(plan), self.steps
        buffer = steps.buffer_for(self._layout.num_words(plan))
        packed = pack_staging(plan, self._layout, buffer.words)
        staging = steps.send(buffer, packed.num_words)
        graph = steps.graph_of(packed, staging, None)
        self.work_done += 1
        drawn = steps.compute(packed, staging, None, None) if graph is None else graph.replay()
        if not packed.num_sampled:  # the caller does not wait for draws, but measures the step
            steps.runner.device.record().wait()
        return drawn

    def _with_changes(self, plan: StepPlan) -> StepPlan:
        """Return a step with the changes that the device lacks."""
        changes, self._changes = self._changes, None
        if changes is None:
            return plan
        entries = np.frombuffer(changes.blocks, np.int32).reshape(-1, 4)
        entries = entries[entries[:, 1] == self._group].copy()
        entries[:, 1] = 0
        return msgspec.structs.replace(plan, new_rows=changes.new_rows, blocks=entries.tobytes())
