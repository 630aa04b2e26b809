"""A model with stages or ranks on two hosts, which are local processes that share only a connection."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tests.deploy.config.model_folder import write_model
from tests.executor.distributed.test_rank_processes import EXECUTOR_ID, config_of, prompt, ranks_of
from tests.processes.test_disaggregation import free_port

from quintet.deploy import embedded
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.registry import make_worker
from quintet.executor.distributed.hosts.member import MemberSettings
from quintet.process.child import error_file
from quintet.wire.config import EngineConfig, HostsConfig
from quintet.wire.step import StepResult

MEMBER = "quintet.executor.distributed.hosts.member"


@pytest.fixture
def hosts(tmp_path: Path) -> HostsConfig:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    return HostsConfig(count=2, address=f"127.0.0.1:{free_port()}", key_file=str(key))


def on(hosts: HostsConfig, config: EngineConfig) -> EngineConfig:
    executor = msgspec.structs.replace(config.executor, hosts=hosts)
    return msgspec.structs.replace(config, executor=executor)


def place(hosts: HostsConfig, run_dir: Path, **changed: object) -> MemberSettings:
    run_dir.mkdir(exist_ok=True)
    own = MemberSettings(
        host=1, hosts=hosts, run_dir=str(run_dir), model_path=str(embedded.default_model_path()),
        packed_cache=None, threads=1, log_level="INFO", available_bytes=1 << 40,
    )  # fmt: skip
    return msgspec.structs.replace(own, **changed)


@contextmanager
def member(own: MemberSettings) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", MEMBER, "--parent", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(own))
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def check_two_hosts(tmp_path: Path, hosts: HostsConfig, config: EngineConfig, alone: StepResult) -> None:
    """Check that two hosts draw the tokens of one, and that a killed rank ends both."""
    there = tmp_path / "there"
    with (
        member(place(hosts, there)) as second,
        ranks_of(on(hosts, config)) as (first, together),
    ):
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
        assert len(psutil.Process(first.pid).children()) == 1, "the hub must be the only child"
        [rank] = psutil.Process(second.pid).children()
        rank.kill()
        assert second.wait(60) == 1 and first.wait(60) == 1
    assert error_file(there, EXECUTOR_ID).read_text() == "rank 1 was killed by SIGKILL; all ranks exit"
    assert error_file(tmp_path, EXECUTOR_ID).read_text() == "hub: host 1 closed the connection"


def test_stages_on_two_hosts_draw_the_tokens_of_one_process_and_end_together(
    tmp_path: Path, hosts: HostsConfig
) -> None:
    alone = make_worker(config_of(tmp_path, 1)).begin(prompt()).result()
    check_two_hosts(tmp_path, hosts, config_of(tmp_path, 1, stages=2), alone)


@pytest.mark.whole
def test_hidden_states_for_a_draft_head_come_from_the_second_host(tmp_path: Path, hosts: HostsConfig) -> None:
    """The head's files are on the first host only."""
    alone = make_worker(config_of(tmp_path, 1)).begin(prompt()).result()
    model, head = config_of(tmp_path, 1).model, tmp_path / "head"
    width, vocab = json.loads(model.hf_config)["hidden_size"], model.vocab_size
    head.mkdir()
    (head / "config.json").write_text("{}")
    shapes = {"0.0.linear.weight": (width, width), "0.0.linear.bias": (width,), "0.1.weight": (vocab, width)}
    save_file({name: torch.rand(shape) for name, shape in shapes.items()}, head / "model.safetensors")
    drafts = {"method": "medusa", "model": str(head), "num_speculative_tokens": 1}
    check_two_hosts(tmp_path, hosts, config_of(tmp_path, 1, stages=2, drafts=json.dumps(drafts)), alone)


@pytest.mark.whole
def test_ranks_on_two_hosts_draw_the_tokens_of_one_host_and_end_together(
    tmp_path: Path, hosts: HostsConfig
) -> None:
    with ranks_of(config_of(tmp_path, 2)) as (_, alone):
        pass
    check_two_hosts(tmp_path, hosts, config_of(tmp_path, 2), alone)


@pytest.mark.whole
def test_layout_invariant_bits_on_two_hosts_equal_one_process(tmp_path: Path, hosts: HostsConfig) -> None:
    def invariant(size: int) -> EngineConfig:
        config = config_of(tmp_path, size)
        executor = msgspec.structs.replace(config.executor, sum_leaves=4)
        return msgspec.structs.replace(config, executor=executor)

    alone = make_worker(invariant(1)).begin(prompt()).result()
    with member(place(hosts, tmp_path / "there")), ranks_of(on(hosts, invariant(2))) as (_, together):
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.whole
@pytest.mark.parametrize(
    "hf_config",
    [
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "conv_kernel": 4},
        {
            "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 4, "head_dim": 32,
            "n_groups": 1, "state_size": 16, "conv_kernel": 4,
        },
    ],
    ids=["queries and keys", "what channels choose", "states"],
)  # fmt: skip
def test_values_that_all_ranks_need_are_gathered_over_hosts(
    hf_config: dict[str, object], tmp_path: Path, hosts: HostsConfig
) -> None:
    shape = {
        "hidden_size": 64, "intermediate_size": 128, "head_dim": None, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 211, "max_position_embeddings": 256,
    }  # fmt: skip
    write_model(tmp_path, **{**shape, **hf_config})
    options = Options(
        model=str(tmp_path), device="cpu", load_format="dummy", tensor_parallel_size=2, threads=1,
        max_model_len=256, max_num_seqs=4, kv_cache_memory="4MiB",
    )  # fmt: skip
    config = resolve(options, tmp_path, http=False).config
    with ranks_of(config) as (_, alone):
        pass
    other = place(hosts, tmp_path / "there", model_path=str(tmp_path))
    with member(other), ranks_of(on(hosts, config)) as (_, together):
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.whole
@pytest.mark.parametrize(("count", "size"), [(2, 4), (4, 4)])
def test_more_ranks_on_more_hosts_draw_the_tokens_of_one_host(
    count: int, size: int, tmp_path: Path, hosts: HostsConfig
) -> None:
    with ranks_of(config_of(tmp_path, size)) as (_, alone):
        pass
    more = msgspec.structs.replace(hosts, count=count)
    with contextlib.ExitStack() as others:
        for host in range(1, count):
            others.enter_context(member(place(more, tmp_path / str(host), host=host)))
        _, together = others.enter_context(ranks_of(on(more, config_of(tmp_path, size))))
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.whole
def test_messages_between_two_members_pass_through_the_hub(tmp_path: Path, hosts: HostsConfig) -> None:
    alone = make_worker(config_of(tmp_path, 1)).begin(prompt()).result()
    three = msgspec.structs.replace(hosts, count=3)
    with (
        member(place(three, tmp_path / "1")),
        member(place(three, tmp_path / "2", host=2)),
        ranks_of(on(three, config_of(tmp_path, 1, stages=3))) as (_, together),
    ):
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
