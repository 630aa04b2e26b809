"""Offline batch inference with Ray Data: ``dataset.map_batches(Completions, …)``, one engine per actor.

    ray.data.read_parquet("prompts").map_batches(
        Completions,
        fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "sampling": {"temperature": 0, "max_tokens": 256}},
        batch_size=256, compute=ray.data.ActorPoolStrategy(size=4), num_cpus=8,
    ).write_parquet("answers")

Actors on one node share its memory: set ``kv_cache_memory`` for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quintet.deploy.integrations.ray.host import with_assigned_threads
from quintet.deploy.python_api.inputs import params_by_name
from quintet.deploy.python_api.offline import LLM
from quintet.wire.params import OutputKind


class Completions:
    """Adds columns ``text``, ``finish_reason``, ``num_tokens`` and ``error`` to batches with a column of prompts.

    ``flags`` are those of `LLM`. A failed prompt sets its ``error`` and does not affect the others. Ray retries the batch of a
    failed actor; outputs are the same for the same seed, or at temperature 0.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str = "prompt",
        sampling: Mapping[str, object] | None = None,
        **flags: object,
    ) -> None:
        self._column = column
        self._params = None if sampling is None else params_by_name(sampling, OutputKind.FINAL_ONLY)
        self._llm = LLM(model, **with_assigned_threads(flags))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._column not in batch:
            raise KeyError(
                f"the batch has the columns {sorted(batch)}, but not {self._column!r}; set column=…"
            )
        prompts = [str(prompt) for prompt in batch[self._column]]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False, errors="return")
        ended = [None if output.error else output.outputs[0] for output in outputs]
        errors = [output.error.message if output.error else "" for output in outputs]
        return {
            **batch,
            "text": np.array([one.text if one else "" for one in ended], dtype=object),
            "finish_reason": np.array(
                [(one.finish_reason or "") if one else "error" for one in ended], dtype=object
            ),
            "num_tokens": np.array([len(one.token_ids) if one else 0 for one in ended], dtype=np.int64),
            "error": np.array(errors, dtype=object),
        }
