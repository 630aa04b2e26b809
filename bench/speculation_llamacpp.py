"""Driver of llama.cpp for `bench.speculation`: generates greedily, without drafts and with its prompt lookup.

    python bench/speculation_llamacpp.py MODEL.gguf THREADS CONTEXT     # in an environment with llama-cpp-python

Each line of input is a JSON object with ``prompt`` (token ids) and ``num_tokens``; of prompt lookup, ``ngram`` is the number of
tokens to compare, at most, and ``drafts`` that of drafts in a step, 0 without. Each line of output has ``tokens_per_s``, after
the first token.
"""

from __future__ import annotations

import json
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def main() -> None:
    """Load the model twice, with and without the logits of all tokens, and handle each line of input."""
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    lookup = LlamaPromptLookupDecoding()
    settings = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    plain = Llama(path, **settings)
    drafting = Llama(path, draft_model=lookup, logits_all=True, **settings)
    for line in sys.stdin:
        job = json.loads(line)
        lookup.max_ngram_size, lookup.num_pred_tokens = job["ngram"], job["drafts"]
        model = drafting if job["drafts"] else plain
        rate = tokens_per_s(model, job["prompt"], job["num_tokens"])
        print(json.dumps({"tokens_per_s": rate}), flush=True)


def tokens_per_s(model: Llama, prompt: list[int], num_tokens: int) -> float:
    """Return tokens per second of a generation, without its prompt."""
    tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0, top_k=1)
    next(tokens)
    began = time.perf_counter()
    for _ in range(num_tokens - 1):
        next(tokens)
    return (num_tokens - 1) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
