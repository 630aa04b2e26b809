"""``quintet serve`` of a sharded checkpoint as `save_pretrained` writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from tests.processes.server import serve


def test_sharded_checkpoint_answers_like_transformers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) >= 3
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(default_model_path()) / name, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = [17, 300, 4000, 5]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 4), max_new_tokens=12, do_sample=False
        )[0, 4:].tolist()
    words = ["--served-model-name", "sharded", "--threads", "1", "--max-num-seqs", "4"]
    with serve(str(tmp_path), *words) as server:
        status, answer = server.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
        )
        assert status == 200, answer
        assert answer["model"] == "sharded" and answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["text"] == tokenizer.decode(expected)
        status, answer = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        )
        assert status == 200 and answer["usage"]["completion_tokens"] >= 1
        assert server.stop() == 0
