"""Models of transformers over our KV memory: its tokens in every schedule, and the reason of each unsupported model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.equality import MORE_SCHEDULES, SCHEDULES, Dtype, alone, load, logits_of
from tests.models.random_checkpoints import LENGTHS, expectations, of_transformers, write_checkpoint
from tests.models.rows import fallback
from tests.models.test_equal import check_once, check_tokens

from quintet.deploy.cli.main import main
from quintet.executor.backends.torch.fallback.attention import UnsupportedModel, window_of
from quintet.executor.models.layers.attention import AttentionWindow
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def write(folder: Path, config: str, **settings: Any) -> None:
    write_checkpoint(of_transformers(config, **settings), folder)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, model_impl="transformers", **options)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(folder))
    return str(caught.value)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("family", fallback.ROWS)
def test_transformers_model_is_equal(family: str, tmp_path: Path) -> None:
    row = fallback.ROWS[family]
    expected = expectations(write_checkpoint(row, tmp_path), LENGTHS)
    check_tokens(load(tmp_path, model_impl="transformers"), row, expected, SCHEDULES)
    check_once(load(tmp_path, compiled=False, model_impl="transformers"), row, expected)


@pytest.mark.whole
@pytest.mark.parametrize("family", fallback.ROWS)
def test_transformers_model_is_equal_in_more_schedules(family: str, tmp_path: Path) -> None:
    row = fallback.ROWS[family]
    expected = expectations(write_checkpoint(row, tmp_path), LENGTHS, seed=7)
    check_tokens(load(tmp_path, model_impl="transformers"), row, expected, MORE_SCHEDULES)
    check_tokens(load(tmp_path, compiled=False, model_impl="transformers"), row, expected, MORE_SCHEDULES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_model_runs_in_half_precision(dtype: Dtype, tmp_path: Path) -> None:
    expected = expectations(write_checkpoint(of_transformers("ApertusConfig"), tmp_path), LENGTHS)
    outcome = alone(load(tmp_path, dtype, model_impl="transformers"), [each.prompt for each in expected])
    for i, each in enumerate(expected):
        first = logits_of(outcome, i, len(each.prompt))[0]
        assert torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1] > 0.99


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ("BertConfig", {}, "its attention is not causal"),
        ("FalconConfig", {"alibi": True}, "does not use transformers' attention interface"),
        ("DogeConfig", {}, "its own code uses the attention mask"),
        ("DiffLlamaConfig", {}, "makes 6 attention calls, but its config implies 3 layers"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}, "of type conv have state"),
        (
            "RecurrentGemmaConfig",
            {"attention_window_size": 16, "lru_width": 64},
            "of type linear_attention have state",
        ),
    ],
)
def test_unsupported_model_is_rejected_before_the_load(
    config: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = getattr(transformers, config)
    chosen = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 97}
    if config != "BertConfig":
        chosen["num_key_value_heads"] = 2
    hf_config = made(**chosen, intermediate_size=96, max_position_embeddings=256, **settings)
    hf_config.architectures = [config.removesuffix("Config") + "ForCausalLM"]
    hf_config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert words in refusal(tmp_path)


def test_plan_names_the_implementation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--model-impl", "transformers"]
    write(tmp_path / "good", "ApertusConfig")
    assert main(["plan", str(tmp_path / "good"), *flags]) == 0
    assert "transformers, with Quintet's paged KV cache" in capsys.readouterr().out
    write(tmp_path / "bad", "DogeConfig")
    assert main(["plan", str(tmp_path / "bad"), *flags]) == EXIT_CONFIG
    assert "its own code uses the attention mask" in capsys.readouterr().err


def test_rotation_by_the_longest_request_is_rejected_beyond_the_original_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    write(tmp_path, "ApertusConfig", rope_parameters=scaling, max_position_embeddings=64)
    assert "--max-model-len to 64 or less" in refusal(tmp_path)


def test_unknown_model_type_error_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3Config")
    hf_config = json.loads((tmp_path / "config.json").read_bytes())
    changes = {"architectures": ["Qwen5ForCausalLM"], "model_type": "qwen5"}
    (tmp_path / "config.json").write_text(json.dumps(hf_config | changes))
    words = refusal(tmp_path)
    assert (
        "supports model_type 'qwen5'" in words
        and "most similar architecture of Quintet is Qwen3_5ForCausalLM" in words
    )


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "ApertusConfig")
    hf_config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": 4}))
    assert "model.layers.3." in refusal(tmp_path) and "missing" in refusal(tmp_path)


MODULE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import create_causal_mask

class OursConfig(PreTrainedConfig):
    model_type = "ours"
    vocab_size: int = 50
    hidden_size: int = 32
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    max_position_embeddings: int = 128
    shifts: bool = False

class Attention(torch.nn.Module):
    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config, self.layer_idx = config, 0
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, mask, shifts):
        if shifts:
            x = x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        q, k, v = (part.view(*x.shape[:2], 2, 16).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, q, k, v, mask, scaling=0.25)[0].flatten(2)

class OursModel(PreTrainedModel):
    config_class = OursConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, 32)
        self.positions = torch.nn.Embedding(128, 32)
        self.attention = Attention(config)
        self.post_init()

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **_):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.embed(input_ids) + self.positions(position_ids)
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids=position_ids)
        return BaseModelOutputWithPast(last_hidden_state=x + self.attention(x, mask, self.config.shifts))

class OursForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OursConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.model = OursModel(config)
        self.lm_head = torch.nn.Linear(32, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **more):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""


def write_code(folder: Path, repository: str = "", **settings: Any) -> None:
    """Write a checkpoint with its own Python model file."""
    folder.mkdir(exist_ok=True)
    (folder / "modeling_ours.py").write_text(MODULE)
    (folder / "tokenizer.json").write_text("{}")
    hf_config = {
        "architectures": ["OursForCausalLM"],
        "model_type": "ours",
        "auto_map": {
            "AutoConfig": f"{repository}modeling_ours.OursConfig",
            "AutoModelForCausalLM": f"{repository}modeling_ours.OursForCausalLM",
        },
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(hf_config | settings))


def test_remote_code_runs_only_if_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "ours"
    write_code(folder)
    error = refusal(folder, load_format="dummy")
    assert "modeling_ours.py" in error and "allow it with --trust-remote-code" in error
    with caplog.at_level(logging.WARNING, "quintet"):
        load(folder, model_impl="transformers", load_format="dummy", trust_remote_code=True)
    assert "--trust-remote-code: executing modeling_ours.py of" in caplog.text
    write_code(folder, "owner/repository--")
    assert "code of another repository" in refusal(folder, load_format="dummy", trust_remote_code=True)


def test_model_with_state_outside_the_kv_cache_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the previous token outside of attention: only the logits reveal it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "ours"
    write_code(folder, shifts=True)
    error = refusal(folder, load_format="dummy", trust_remote_code=True)
    assert "the self-check failed: logits differ by" in error


Index = torch.Tensor


@pytest.mark.parametrize(
    ("sees", "attention_window"),
    [
        (lambda q, k: k <= q, AttentionWindow()),
        (lambda q, k: (k <= q) & (k > q - 7), AttentionWindow(window=7)),
        (lambda q, k: (k <= q) & (k > q - 1), AttentionWindow(window=1)),
        (lambda q, k: (k <= q) & (k // 16 == q // 16), AttentionWindow(chunk=16)),
        (lambda q, k: (k <= q) & (k > q - 400), AttentionWindow()),
    ],
)
def test_mask_function_is_recognised(sees: Any, attention_window: AttentionWindow) -> None:
    def function(batch: Index, head: Index, q: Index, k: Index) -> Index:
        seen: Index = sees(q, k)
        return seen

    assert window_of(function, 100, torch.device("cpu")) == attention_window


@pytest.mark.parametrize(
    ("sees", "words"),
    [
        (lambda q, k: k >= 0, "not causal"),
        (lambda q, k: (k <= q) & (k % 2 == 0), "neither"),
        (lambda q, k: (k <= q) & ((k > q - 7) | (k < 4)), "neither"),
    ],
)
def test_unknown_mask_is_rejected(sees: Any, words: str) -> None:
    def function(batch: Index, head: Index, q: Index, k: Index) -> Index:
        seen: Index = sees(q, k)
        return seen

    with pytest.raises(UnsupportedModel, match=words):
        window_of(function, 100, torch.device("cpu"))
