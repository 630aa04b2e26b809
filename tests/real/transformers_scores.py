"""Log-probabilities of given tokens by transformers, in float32, of a GGUF file's dequantized weights.

Run in an environment that has accelerate; reads JSON ``[file, [ids, …]]``, writes JSON of `Scores` for each list.
"""

import json
import sys
from pathlib import Path

sys.path.pop(0)  # this folder
import torch
from transformers import AutoModelForCausalLM

file, sequences = json.load(sys.stdin)
path = Path(file)
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
model.eval()
scored = []
with torch.inference_mode():
    for ids in sequences:
        tokens = torch.tensor([ids])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        scored.append([own.tolist(), logprobs.max(-1).values.tolist()])
print(json.dumps(scored))
