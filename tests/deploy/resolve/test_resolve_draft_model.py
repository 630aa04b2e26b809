"""Draft models of speculative decoding: their share of memory, and rejections of those that do not fit, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deploy.config.model_folder import write_model
from tests.deploy.resolve.test_resolve_kv_disk import MAMBA

from quintet.deploy.cli.headless import located
from quintet.deploy.cli.main import main
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.embedded import draft_model_path
from quintet.deploy.tools.plan_parts import disk_plan, draft_index_bytes
from quintet.executor.distributed.hosts.member import check_memory as check_member_memory
from quintet.executor.speculation.gram_index import GramIndex, grams_of
from quintet.executor.speculation.output_cache import CACHED_TOKEN_BYTES, OutputCache
from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.errors import ConfigError

WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 64,
    "num_hidden_layers": 2,
}


def flag(model: object, **keys: Any) -> str:
    return json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 4} | keys)


def config_of(folder: Path, **options: object) -> EngineConfig:
    requested: dict[str, object] = {"device": "cpu", "load_format": "dummy", "model": str(folder / "target")}
    return resolve(Options(**(requested | options)), folder, http=False).config  # type: ignore[arg-type]


def speculative_of(config: EngineConfig) -> SpeculativeConfig:
    assert config.scheduler.speculative is not None
    return config.scheduler.speculative


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "target")
    return tmp_path


def test_kv_memory_holds_equally_many_blocks_of_both_models(folder: Path) -> None:
    draft = write_model(folder / "draft", num_hidden_layers=1, max_position_embeddings=128, vocab_size=90)
    config = config_of(folder, speculative_config=flag(draft), kv_cache_memory="1MiB")
    found = speculative_of(config).draft
    assert found is not None and found.group == 0
    assert (found.model.max_model_len, found.model.vocab_size) == (128, 90)
    own, theirs = 2 * 2 * 2 * 16 * 2 * 16, 2 * 2 * 16 * 2 * 16
    assert (config.model.kv.bytes_per_block, found.model.kv.bytes_per_block) == (own + theirs, theirs)
    assert config.model.kv.num_blocks(config.cache.memory_bytes) == (1 << 20) // (own + theirs)


def test_ranks_have_equally_many_blocks_within_their_common_memory(folder: Path) -> None:
    """Only rank 0 has the draft model; its memory is counted once."""
    draft = write_model(folder / "draft", num_hidden_layers=1)
    options: dict[str, Any] = {"speculative_config": flag(draft), "kv_cache_memory": "1MiB"}
    own, theirs = 2 * 2 * 2 * 16 * 2 * 16, 2 * 2 * 16 * 2 * 16
    for ranks, context in ((2, 1), (4, 2)):
        config = config_of(
            folder, tensor_parallel_size=ranks, decode_context_parallel_size=context, **options
        )
        num_blocks = config.model.kv.num_blocks(config.cache.memory_bytes)
        found = speculative_of(config).draft
        assert found is not None and found.model.kv.bytes_per_block == theirs
        of_ranks = own // 2 * config.executor.num_kv_memories
        assert num_blocks == (1 << 20) // (of_ranks + theirs)
    config = config_of(folder, pipeline_parallel_size=2, **options)
    assert config.model.kv.num_blocks(config.cache.memory_bytes) == (1 << 20) // (own + theirs)


def test_hosts_have_equally_much_memory_with_a_draft_model_on_the_first(folder: Path) -> None:
    draft, key = write_model(folder / "draft", num_hidden_layers=1), folder / "key"
    key.write_bytes(b"k" * 32)
    own, theirs = 2 * 2 * 2 * 16 * 2 * 16, 2 * 2 * 16 * 2 * 16
    for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
        for hosts in (1, 2):
            options: dict[str, Any] = {layout: 2, "kv_cache_memory": "1MiB", "nnodes": hosts}
            options["group_key"] = str(key) if hosts > 1 else None
            config = config_of(folder, speculative_config=flag(draft), **options)
            num_blocks = config.model.kv.num_blocks(config.cache.memory_bytes)
            assert num_blocks == (1 << 20) // (own + hosts * theirs)
            of_other = num_blocks * own // hosts
            if hosts == 2:
                check_member_memory(config, of_other)
                with pytest.raises(ConfigError, match="lower --kv-cache-memory on the first host"):
                    check_member_memory(config, of_other - 1)


def test_disk_holds_as_many_blocks_as_without_a_draft_model(folder: Path) -> None:
    """Keys and values of the draft model are not written."""
    draft = write_model(folder / "draft")
    options = {"kv_disk": str(folder / "kv"), "kv_disk_size": "1MiB", "max_model_len": 64}
    plans = [
        disk_plan(config_of(folder, **options, **more)) for more in ({}, {"speculative_config": flag(draft)})
    ]
    sizes = [None if plan is None else (plan.num_blocks, plan.staging_bytes) for plan in plans]
    assert sizes[0] is not None and sizes[1] == sizes[0]


def test_draft_model_uses_the_blocks_of_full_attention(folder: Path) -> None:
    write_model(folder / "target", **{**WINDOWS, "num_hidden_layers": 4, "max_window_layers": 2})
    draft = write_model(folder / "draft", **WINDOWS, max_window_layers=1)
    config = config_of(folder, speculative_config=flag(draft))
    found = speculative_of(config).draft
    assert found is not None
    assert config.model.kv.groups[found.group].kind == "full"
    assert [(group.kind, group.layers) for group in found.model.kv.groups] == [("full", [0, 1])]


def test_draft_model_on_a_gpu(folder: Path) -> None:
    """Its kernels compute no drafts with recurrent states, and experts with rows of whole 16 bytes only."""
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    draft = write_model(folder / "draft", num_hidden_layers=1)
    config = config_of(folder, speculative_config=flag(draft), device="cuda")
    found = speculative_of(config).draft
    assert found is not None and config.model.kv.draft_bytes == found.model.kv.bytes_per_block
    for changes, message in (
        (MAMBA, "recurrent states"),
        (experts | {"intermediate_size": 100}, "rows of 100"),
    ):
        refused = write_model(folder / message.replace(" ", ""), **changes)
        config_of(folder, speculative_config=flag(refused))
        with pytest.raises(ConfigError, match=f"{message}.* --device cpu"):
            config_of(folder, speculative_config=flag(refused), device="cuda")


@pytest.mark.parametrize(
    ("key", "expected"), [(None, "int4"), ("w8a8", "w8a8"), ("none", "none"), ("awq", "int4")]
)
def test_quantization_applies_to_both_models_unless_a_key_changes_it(
    key: str | None, expected: str, folder: Path
) -> None:
    draft = write_model(folder / "draft")
    config = config_of(folder, speculative_config=flag(draft, quantization=key), quantization="int4")
    found = speculative_of(config).draft
    assert found is not None and (found.quantization, config.executor.quantization) == (expected, "int4")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_plan_shows_the_memory_of_earlier_text(method: str, folder: Path) -> None:
    """The plan's figure is that of the arrays that a drafter allocates, for the longest requests in all slots."""
    text = json.dumps({"method": method, "num_speculative_tokens": 4})
    config = config_of(folder, speculative_config=text, max_num_seqs=2, max_model_len=512)
    speculative = speculative_of(config)
    index = GramIndex(np.zeros(512, np.int32), grams_of(speculative), 8)
    expected = 2 * round(index.bytes_per_token * 512)
    if method == "suffix":
        num_tokens, grams = speculative.suffix_decoding_corpus_tokens, grams_of(speculative)
        cache = OutputCache(10, num_tokens, grams, 8)
        expected += round((cache.index.bytes_per_token + CACHED_TOKEN_BYTES) * cache.index.capacity)
    assert draft_index_bytes(config) == pytest.approx(expected, rel=0.001)
    assert draft_index_bytes(config_of(folder)) == 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_plan_shows_the_recurrent_states_before_drafts(
    method: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(folder / "target", **MAMBA)
    flags = ["--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "4", "--kv-cache-memory", "16MiB"]
    sizes = []
    for count in (2, 8):
        value = json.dumps({"method": method, "num_speculative_tokens": count})
        drafts = ["--speculative-config", value]
        assert main(["plan", str(folder / "target"), *flags, *drafts, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["draft_state_bytes"])
    assert 0 < 4 * sizes[0] == sizes[1] < (16 << 20) / 8
    assert main(["plan", str(folder / "target"), *flags, *drafts]) == 0
    assert "for the recurrent states before drafts" in capsys.readouterr().out
    assert main(["plan", str(folder / "target"), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_state_bytes"] == 0


def test_recurrent_states_of_a_draft_model_are_in_memory_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two states of each request that fits into 1/8 of the KV memory: at least one, at most all."""
    write_model(folder / "target", max_position_embeddings=8192)
    draft = write_model(folder / "draft", **MAMBA)
    for memory, num_requests in (("256KiB", 1), ("1MiB", 3), ("8MiB", 4)):
        words = f"--device cpu --load-format dummy --max-num-seqs 4 --kv-cache-memory {memory}".split()
        words += ["--speculative-config", flag(draft)]
        assert main(["plan", str(folder / "target"), *words, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["draft"]
        assert plan["state_bytes"] == num_requests * 2 * 2 * (3 * 128 * 2 + 16 * 128 * 4), memory
    assert main(["plan", str(folder / "target"), *words]) == 0
    assert "draft model states" in capsys.readouterr().out


def test_draft_model_without_attention_needs_no_full_attention(folder: Path) -> None:
    write_model(folder / "target", **MAMBA)
    draft = write_model(folder / "draft", **MAMBA)
    found = speculative_of(config_of(folder, speculative_config=flag(draft))).draft
    assert found is not None and found.states is not None
    assert [(group.kind, group.layers) for group in found.states.groups] == [("full", []), ("state", [0, 1])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM, which only transformers computes"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_unfit_draft_model_is_refused_by_name(changes: dict[str, Any], message: str, folder: Path) -> None:
    draft = write_model(folder / "draft", **changes)
    with pytest.raises(ConfigError) as error:
        config_of(folder, speculative_config=flag(draft))
    assert message in str(error.value) and "draft" in str(error.value)


def test_missing_draft_model_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative-config: model '/nowhere': folder not found"):
        config_of(folder, speculative_config=flag("/nowhere"))


def test_draft_model_with_other_tokens_is_refused(folder: Path) -> None:
    draft = write_model(folder / "draft")
    (draft / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<stop>"}]}))
    with pytest.raises(ConfigError, match="token 9 is '<stop>' there and '<end>' in the served model"):
        config_of(folder, speculative_config=flag(draft))


@pytest.mark.parametrize("target", [MAMBA, {**WINDOWS, "max_window_layers": 0}])
def test_served_model_without_full_attention_is_refused(target: dict[str, Any], folder: Path) -> None:
    draft = write_model(folder / "draft")
    write_model(folder / "target", **target)
    with pytest.raises(ConfigError, match="has no layer with full attention"):
        config_of(folder, speculative_config=flag(draft))


def head_of(folder: Path, **changes: Any) -> Path:
    """Write an EAGLE-3 head for the model of `folder`, without weights."""
    keys = {"num_hidden_layers": 1, "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [2, 0]}
    return write_model(folder / "head", **(keys | changes))


def test_head_reads_hidden_states_of_its_layers(folder: Path) -> None:
    config = config_of(folder, speculative_config=flag(head_of(folder), method="eagle3"), dtype="float32")
    found = speculative_of(config).draft
    assert found is not None and speculative_of(config).method == "eagle3"
    assert (found.aux_layers, found.model.vocab_size, found.model.dtype) == ([0, 2], 40, "float32")
    kv, features = 2 * 2 * 16 * 4 * 16, 16 * 64 * 4
    assert found.model.kv.bytes_per_block == kv and config.model.kv.draft_bytes == kv + features


def speculators_head(folder: Path, **section: Any) -> Path:
    """Write a head in the format of the library ``speculators``."""
    hf_config = json.loads((head_of(folder) / "config.json").read_text())
    ids = hf_config.pop("eagle_aux_hidden_state_layer_ids")
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": hf_config,
        "draft_vocab_size": hf_config.pop("draft_vocab_size"),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": ids,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(folder / "target"), "architectures": []},
        }
        | section,
    }
    (folder / "head" / "config.json").write_text(json.dumps(outer))
    return folder / "head"


def test_head_of_the_speculators_library_is_read(folder: Path) -> None:
    config = config_of(folder, speculative_config=flag(speculators_head(folder), method="eagle3"))
    found = speculative_of(config).draft
    assert found is not None and (found.aux_layers, found.model.vocab_size) == ([0, 2], 40)


def test_a_head_as_model_is_served_with_the_model_that_it_names(folder: Path) -> None:
    """``vllm serve RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3``."""
    head = str(speculators_head(folder))
    config = config_of(folder, model=head)
    assert config.model.path == str(folder / "target") and config.model.served_names == [head]
    speculative = speculative_of(config)
    assert (speculative.method, speculative.num_speculative_tokens) == ("eagle3", 3)
    assert speculative.draft is not None and speculative.draft.model.path == head
    assert located(Options(model=head)) == folder / "target", "also on other hosts"
    named = config_of(folder, model=head, served_model_name=["llama"])
    assert named.model.served_names == ["llama"]


@pytest.mark.parametrize(
    "section", [{"verifier": None}, {"verifier": {"name_or_path": None}}, {"proposal_methods": []}], ids=str
)
def test_a_head_that_names_no_model_is_refused(section: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculators_config: .*; give MODEL and --speculative-config"):
        config_of(folder, model=str(speculators_head(folder, **section)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 128}, "is for a model with hidden size 128, but"),
        ({"vocab_size": 90}, "is for a model with vocabulary size 90, but"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]},
            "is for a model with number of layers at least 5, but",
        ),
        ({"hidden_size": 32, "target_hidden_size": 64}, "is for a model with embedding width 32, but"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
        ({"norm_output": True}, "norm_output is True"),
        ({"draft_vocab_size": 101}, "draft_vocab_size is 101"),
    ],
)
def test_head_of_another_model_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    head = head_of(folder, **changes)
    with pytest.raises(ConfigError) as error:
        config_of(folder, speculative_config=flag(head, method="eagle3"))
    assert message in str(error.value) and "head" in str(error.value)


def test_folder_without_configuration_is_no_head(folder: Path) -> None:
    head = head_of(folder)
    (head / "config.json").rename(head / "hf_config.json")
    with pytest.raises(ConfigError, match=r"--speculative-config: head .* has no config\.json"):
        config_of(folder, speculative_config=flag(head, method="eagle3"))


def test_plan_shows_the_memory_of_the_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--device", "cpu", "--kv-cache-memory", "1MiB", "--speculative-config"]
    assert main([*words, flag(draft_model_path()), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["draft"]["weight_bytes"] > 900_000 and plan["draft"]["kv_bytes_per_token"] == 192
    assert plan["kv_bytes_per_token"] == 2048 + 192 and plan["num_blocks"] == (1 << 20) // (16 * (2048 + 192))
    assert main([*words, flag(draft_model_path())]) == 0
    assert "192 B of KV per token" in capsys.readouterr().out
    ranks = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    assert main([*words, flag(draft_model_path()), *ranks]) == 0
    assert "all in rank 0 of the first stage" in capsys.readouterr().out
