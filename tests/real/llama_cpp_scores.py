"""Log-probabilities of given tokens by llama.cpp: reads JSON ``[file, [ids, …]]``, writes JSON of `Scores` for each list."""

import json
import sys

sys.path.pop(0)  # this folder
import numpy as np
from llama_cpp import Llama

file, sequences = json.load(sys.stdin)
longest = max(map(len, sequences))
model = Llama(file, n_ctx=longest + 8, n_batch=512, n_threads=2, logits_all=True, verbose=False)
scored = []
for ids in sequences:
    model.reset()
    model.eval(ids)
    logits = model.scores[: len(ids) - 1].astype(np.float64)
    most = logits.max(-1, keepdims=True)
    logprobs = logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))
    own = logprobs[np.arange(len(ids) - 1), ids[1:]]
    scored.append([own.tolist(), logprobs.max(-1).tolist()])
print(json.dumps(scored))
