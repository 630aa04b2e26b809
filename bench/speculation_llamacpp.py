"""Driver of llama.cpp for `bench.speculation`: generates greedily, without drafts and with drafts.

    python bench/speculation_llamacpp.py MODEL.gguf THREADS CONTEXT [DRAFT.gguf]     # in an environment with llama-cpp-python

Drafts are those of the second model, or of prompt lookup. Each line of input is a JSON object with ``prompt`` (token ids) and
``num_tokens``; ``ngram`` is the number of tokens that prompt lookup compares, at most, and ``drafts`` that of drafts in a step, 0
without. Each line of output has ``tokens_per_s``, after the first token.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

GREEDY = {"temp": 0.0, "repeat_penalty": 1.0, "top_k": 1}


class DraftModel(LlamaDraftModel):  # type: ignore[misc]
    """A second model as a source of drafts; it keeps the KV of the common prefix between calls."""

    def __init__(self, model: Llama) -> None:
        self.model, self.num_pred_tokens = model, 0

    def __call__(self, input_ids: Any, /, **_: object) -> Any:
        """Return the greedy continuation of ``input_ids``, an array of token ids."""
        tokens = self.model.generate(input_ids.tolist(), **GREEDY)
        return np.array(list(islice(tokens, self.num_pred_tokens)), np.intc)


def main() -> None:
    """Load the model twice, with and without the logits of all tokens, and handle each line of input."""
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    settings = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    drafts = DraftModel(Llama(sys.argv[4], **settings)) if sys.argv[4:] else LlamaPromptLookupDecoding()
    plain = Llama(path, **settings)
    drafting = Llama(path, draft_model=drafts, logits_all=True, **settings)
    for line in sys.stdin:
        job = json.loads(line)
        drafts.max_ngram_size, drafts.num_pred_tokens = job["ngram"], job["drafts"]
        model = drafting if job["drafts"] else plain
        rate = tokens_per_s(model, job["prompt"], job["num_tokens"])
        print(json.dumps({"tokens_per_s": rate}), flush=True)


def tokens_per_s(model: Llama, prompt: list[int], num_tokens: int) -> float:
    """Return tokens per second of a generation, without its prompt."""
    tokens = model.generate(prompt, **GREEDY)
    next(tokens)
    began = time.perf_counter()
    for _ in range(num_tokens - 1):
        next(tokens)
    return (num_tokens - 1) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
