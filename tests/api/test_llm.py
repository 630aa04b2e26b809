"""``LLM``: prompt forms, order, lazy iteration, errors, clean shutdown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import torch

import quintet
from quintet import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quintet.deploy.embedded import default_model_path
from quintet.deploy.python_api.inputs import PromptInput
from quintet.deploy.python_api.offline import EngineError
from quintet.wire.errors import ConfigError, ErrorCode, RequestError
from tests.deploy.supervisor.supervised import is_readable

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=7)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(executor="mock", max_model_len=512, enable_prompt_embeds=True) as llm:
        yield llm


def test_prompts_as_vectors(llm: LLM) -> None:
    """Tensors and arrays next to text; invalid tensors are rejected by name."""
    width = json.loads((Path(default_model_path()) / "config.json").read_text())["hidden_size"]
    rows = torch.zeros((7, width), dtype=torch.bfloat16)
    prompts: list[PromptInput] = [{"prompt_embeds": rows}, "text", {"prompt_embeds": rows.float().numpy()}]
    first, text, second = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert first.prompt_token_ids == [] and text.prompt_token_ids == llm.encode("text")
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != []
    for given, words in (
        (rows[0], "shape"),
        (rows[:, 1:], "but the model's width is"),
        ("text", "pass a tensor"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate({"prompt_embeds": given}, GREEDY, use_tqdm=False)


def test_a_list_gives_outputs_in_order(llm: LLM) -> None:
    prompts = [f"def f{i}():" for i in range(40)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished and output.error is None
        assert output.prompt_token_ids == llm.encode(output.prompt or "")
        (choice,) = output.outputs
        assert len(choice.token_ids) == 6 and choice.finish_reason == "length" and choice.finished
        assert choice.text == llm.decode(choice.token_ids)
        assert output.metrics.first_token_s is not None and output.metrics.scheduled_s is not None
        assert output.metrics.arrival_s <= output.metrics.scheduled_s <= output.metrics.first_token_s


def test_every_form_of_one_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.encode("import os")
    forms: list[Any] = ["import os", ids, {"prompt": "import os"}, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False)[0] for form in forms]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert {output.outputs[0].text for output in outputs} == {outputs[0].outputs[0].text}
    assert [output.prompt for output in outputs] == ["import os", None, "import os", None, None]


def test_an_iterator_is_read_lazily_in_a_bounded_window(llm: LLM) -> None:
    num_taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_taken
        for i in range(3000):
            num_taken += 1
            yield [5 + i % 100, 7]

    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert num_taken == 0
    ahead = []
    for index, output in enumerate(outputs):
        assert output.prompt_token_ids == [5 + index % 100, 7]
        ahead.append(num_taken - index)
    assert num_taken == len(ahead) == 3000
    assert max(ahead) <= 513


def test_iterator_may_be_closed_early(llm: LLM) -> None:
    endless = iter(lambda: "again", None)
    outputs = llm.generate(endless, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert next(outputs).finished
    outputs.close()  # type: ignore[attr-defined]
    assert llm.generate("and after", GREEDY, use_tqdm=False)[0].finished


def test_parameters_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    with pytest.raises(ValueError, match="more prompts than"):
        list(llm.generate(iter("abcd"), iter(params), use_tqdm=False))


def test_batch_uses_longest_first_by_default(llm: LLM) -> None:
    scheduler = llm._engine.config.scheduler
    assert (scheduler.policy, scheduler.step_target_ms) == ("longest", 0)
    flags: Any = {"scheduling_policy": "fcfs", "step_target_ms": 40}
    with LLM(executor="mock", max_model_len=512, **flags) as other:
        scheduler = other._engine.config.scheduler
        assert (scheduler.policy, scheduler.step_target_ms) == ("fcfs", 40)


def test_default_max_tokens_is_sixteen(llm: LLM) -> None:
    assert len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_default_max_tokens_shrinks_for_a_long_prompt(llm: LLM) -> None:
    long = [5] * 505
    assert len(llm.generate(long, use_tqdm=False)[0].outputs[0].token_ids) <= 7
    with pytest.raises(RequestError, match="you requested 521 tokens"):
        llm.generate(long, SamplingParams(max_tokens=16), use_tqdm=False)


def test_several_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert all(len(choice.token_ids) == 4 for choice in output.outputs)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    other = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "bye"}]
    single = llm.chat(one, GREEDY, use_tqdm=False)
    several = llm.chat([one, other], GREEDY, use_tqdm=False)
    lazily = list(llm.chat(iter([one, other]), GREEDY, use_tqdm=False))
    assert len(single) == 1 and len(several) == 2
    assert single[0].prompt_token_ids == several[0].prompt_token_ids == lazily[0].prompt_token_ids
    assert "hello" in llm.decode(single[0].prompt_token_ids)
    for message in ({"text": "hello"}, {"role": "user", "content": 5}, {"role": "user", "tool_calls": {}}):
        with pytest.raises(RequestError, match="'role': 'user'"):
            llm.chat([message], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty list"),
        ([1, -4], "token id -4; ids must be between 0"),
        ([10**6], "1000000"),
        ({"promt": "x"}, "'promt'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "one of"),
        (b"bytes", "bytes"),
        (list(range(5, 905)), "512"),
        ("half a pair \ud83d", "at character 12"),
        ({"prompt": "x", "cache_salt": "\ud83d"}, "cache_salt contains"),
    ],
)
def test_invalid_prompts_raise_an_explanation(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    first, second, third = llm.generate(["ok", prompt, "ok"], GREEDY, use_tqdm=False, errors="return")
    assert first.error is None and third.error is None and len(third.outputs[0].token_ids) == 6
    assert second.error is not None and words in second.error.message


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(temperature=9.0), "temperature is 9.0"),
        (SamplingParams(temperature="hot"), "temperature is 'hot'"),  # type: ignore[arg-type]
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        ("greedy", "pass SamplingParams"),
        (SamplingParams(top_k=10**30), "top_k"),
        (SamplingParams(stop=["\ud83d"]), "stop"),
    ],
)
def test_invalid_parameters_raise_an_explanation(llm: LLM, params: SamplingParams, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate("x", [params], use_tqdm=False)


def test_unencodable_texts_and_numbers_are_rejected(llm: LLM) -> None:
    def conversation(text: object) -> list[dict[str, object]]:
        return [{"role": "user", "content": text}]

    with pytest.raises(RequestError, match=r"messages contains the lone surrogate .* at character 2"):
        llm.chat(conversation("ab\ud83d"), GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="messages cannot be encoded as JSON"):
        llm.chat(conversation(object()), GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="text contains"):
        llm.encode("\ud83d")
    for token_id in (-1, 10**30, "x"):
        with pytest.raises(
            RequestError, match=f"token_ids (holds|contains) .*{token_id!r}; .*(between 0 and|from 0 to) "
        ):
            llm.decode([token_id])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="priority"):
        llm.generate("x", GREEDY, priority=10**30, use_tqdm=False)


def test_parameters_may_be_changed_and_passed_again(llm: LLM) -> None:
    def one_object() -> Iterator[SamplingParams]:
        params = SamplingParams(ignore_eos=True, stop_token_ids=[])
        for params.max_tokens in (1, 2, 3):
            yield params
        params.stop_token_ids += range(llm.vocab_size)
        yield params

    outputs = llm.generate(["a", "b", "c", "d"], one_object(), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [1, 2, 3]
    assert outputs[3].outputs[0].finish_reason == "stop"


def test_a_lone_stop_string_is_a_list_of_one(llm: LLM) -> None:
    (free,) = llm.generate(
        "x", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=7), use_tqdm=False
    )
    stop = llm.decode(free.outputs[0].token_ids[4:5])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=7, stop=stop)  # type: ignore[arg-type]
    (stopped,) = llm.generate("x", params, use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == stop
    assert free.outputs[0].text.startswith(stopped.outputs[0].text) and stop not in stopped.outputs[0].text


def test_progress_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"] * 3, GREEDY)
    assert "3/3" in capsys.readouterr().err
    llm.generate(["a"] * 3, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_flags_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM(max_model_length=5)
    with pytest.raises(ConfigError, match="folder not found"):
        LLM(str(tmp_path / "nothing"))


def test_failed_boot_raises_the_error_of_the_child(tmp_path: Path) -> None:
    from quintet.deploy.embedded import default_model_path

    for file in Path(default_model_path()).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises((EngineError, ConfigError), match="tokenizer"):
        LLM(str(tmp_path), executor="mock")


def test_after_shutdown_calls_raise_and_no_process_is_left() -> None:
    llm = LLM(executor="mock")
    supervisor = psutil.Process(llm._engine._supervisor.process.pid)
    family = [supervisor, *supervisor.children()]
    run_dir = Path(llm._engine.config.run_dir)
    assert len(family) == 5 and run_dir.exists()
    llm.shutdown()
    llm.shutdown()
    assert not any(process.is_running() for process in family)
    assert not run_dir.exists()
    with pytest.raises(EngineError, match="shut down"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(EngineError, match="shut down"):
        llm.encode("x")


def test_lost_engine_raises() -> None:
    with LLM(executor="mock", step_ms=20.0) as llm:
        outputs = llm.generate(
            iter(["a"] * 4), SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False
        )
        llm._engine._supervisor.process.kill()
        with pytest.raises((RequestError, EngineError), match="stopped"):
            next(outputs)
        with pytest.raises(EngineError, match="stopped"):
            llm.generate("b", use_tqdm=False)


def test_query_to_a_dead_tokenizer_is_resent(llm: LLM) -> None:
    """Another tokenizer process answers, as for the HTTP frontend."""
    (tokenizer,) = [
        child
        for child in psutil.Process(llm._engine._supervisor.process.pid).children(recursive=True)
        if (child.cmdline() or [""])[0].startswith("quintet-tokenizer-0")
    ]
    expected, answers = llm.encode("import os"), SimpleQueue[list[int] | Exception]()

    def ask() -> None:
        try:
            answers.put(llm.encode("import os"))
        except RequestError as error:
            answers.put(error)

    tokenizer.suspend()
    thread = threading.Thread(target=ask)
    thread.start()
    while not llm._engine.queries._waiting:
        pass
    tokenizer.kill()
    assert answers.get(timeout=20) == expected  # an unanswered query fails after 30 s
    thread.join()


def test_error_on_the_loop_is_raised_in_the_calling_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise LookupError("internal error")

    def refuse(*args: object, **options: object) -> None:
        raise RequestError(ErrorCode.INVALID, "no such thing")

    llm = LLM(executor="mock")
    run_dir = Path(llm._engine.config.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.requests, "submit", fail)
        with pytest.raises(LookupError, match="internal error"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, errors="return")
        patch.setattr(llm._engine.requests, "submit", refuse)
        (refused,) = llm.generate("a", GREEDY, use_tqdm=False, errors="return")
        assert refused.error is not None and refused.error.message == "no such thing"
    with monkeypatch.context() as patch:
        patch.setattr("quintet.deploy.python_api.outputs.Assembler.start", fail)
        with pytest.raises(LookupError, match="internal error"):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
    monkeypatch.setattr(llm._engine.requests, "fail_all", fail)
    with pytest.raises(LookupError, match="internal error"):
        llm.shutdown()
    assert not llm._thread.is_alive() and llm._loop.is_closed() and not run_dir.exists()


def test_shutdown_ends_the_calls_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(executor="mock", step_ms=20.0)
    endings: SimpleQueue[object] = SimpleQueue()
    called = threading.Event()

    def generate() -> None:
        endless = llm.generate(
            iter(lambda: "a", None), SamplingParams(max_tokens=300), use_tqdm=False, errors="return"
        )
        try:
            for output in endless:
                assert output.error is not None
        except EngineError as error:
            endings.put(error)

    def encode() -> None:
        try:
            llm.encode("a")
        except EngineError as error:
            endings.put(error)

    def silence(*args: object) -> bool:
        called.set()
        return True

    generating = threading.Thread(target=generate, daemon=True)
    generating.start()
    monkeypatch.setattr(llm._engine.queries, "_send", silence)
    threading.Thread(target=encode, daemon=True).start()
    assert called.wait(10)
    llm.shutdown()
    assert "shut down" in str(endings.get(timeout=10)) and "shut down" in str(endings.get(timeout=10))


SCRIPT = """
from quintet import LLM, SamplingParams
llm = LLM(executor="mock", step_ms=50.0)
print("PIDS", llm._engine._supervisor.process.pid, flush=True)
llm.generate(["x"] * 8, SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
"""


def test_kill_9_of_the_program_leaves_no_process(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    supervisor = psutil.Process(int(program.stdout.readline().split()[1]))
    family = [supervisor, *supervisor.children()]
    ends = [os.pidfd_open(process.pid) for process in family]
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    for end, process in zip(ends, family, strict=True):
        assert is_readable(end, 10), f"{process} still runs"
        os.close(end)
    assert len(family) == 5


def test_a_plain_script_needs_no_main_guard_and_no_shutdown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from quintet import LLM, SamplingParams
            llm = LLM(executor="mock")
            print(len(llm.generate(["a", "b"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)))
            """
        )
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")


FORKING = """
import os, sys
from quintet import LLM, SamplingParams
llm = LLM(executor="mock")
child = os.fork()
if child == 0:
    try:
        llm.generate("x", use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print(len(llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)))
"""


def test_forked_child_does_not_stop_its_parents_engine() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    refusal, count = ended.stdout.splitlines()
    assert "after fork" in refusal and count == "2"


LIVING_CHILD = """
import os
from quintet import LLM
llm = LLM(executor="mock")
supervisor = llm._engine._supervisor.process
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.close(write)
    os.read(read, 1)
    os._exit(0)
llm.shutdown()
print(supervisor.returncode)
os.close(write)
os.waitpid(child, 0)
"""


def test_shutdown_does_not_wait_for_a_forked_child() -> None:
    """A supervisor that does not end is killed after 10 s."""
    ended = subprocess.run(
        [sys.executable, "-c", LIVING_CHILD], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def test_a_program_without_standard_input_starts_an_engine() -> None:
    program = 'from quintet import LLM; LLM(executor="mock").shutdown()'
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_iterators_raise_after_shutdown() -> None:
    llm = LLM(executor="mock")
    iterators = [
        llm.generate(iter(lambda: "a", None), SamplingParams(max_tokens=1), use_tqdm=False, errors=errors)
        for errors in ("raise", "return")
    ]
    for outputs in iterators:
        assert next(outputs).finished
    llm.shutdown()
    for outputs in iterators:
        with pytest.raises(EngineError, match="shut down"):
            for _ in outputs:
                pass


def test_the_loops_own_thread_may_collect_the_engine() -> None:
    llm = LLM(executor="mock")
    run_dir = Path(llm._engine.config.run_dir)
    llm._loop.call_soon_threadsafe(llm._shutdown)
    llm._thread.join(20)
    assert llm._loop.is_closed() and not run_dir.exists()


def _check_forms(llm: quintet.LLM) -> None:
    """Each prompt in its own form; an error names its prompt."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["a"],
    }
    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    choice = StructuredOutputsParams(choice=["left", "right"])
    refused = StructuredOutputsParams(json={"not": {}})
    forms = (closed, choice, refused)
    params = [SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=form) for form in forms]
    one, other, wrong = llm.generate(["x"] * 3, params, use_tqdm=False, errors="return")
    assert set(json.loads(one.outputs[0].text)) == {"a"}
    assert other.outputs[0].text in {"left", "right"}
    assert wrong.error is not None and "not" in str(wrong.error)
    with pytest.raises(RequestError, match="exactly one of"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams()), use_tqdm=False)


def test_embedded_model_is_deterministic() -> None:
    with quintet.LLM(threads=1, max_num_seqs=8, max_model_len=256) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1)
        first, again = llm.generate(["import os\\nimport "] * 2, params, use_tqdm=False)
        _check_forms(llm)
    choice = first.outputs[0]
    assert choice.token_ids == again.outputs[0].token_ids
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    assert all(token in position for token, position in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert first.prompt_logprobs[0] is None


def test_beam_search_per_prompt(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    outputs = llm.beam_search(["def f():", {"prompt_token_ids": [7, 8]}], params)
    for output, prompt in zip(outputs, (llm.encode("def f():"), [7, 8]), strict=True):
        assert len(output.sequences) == 3
        for found in output.sequences:
            assert found.tokens[: len(prompt)] == prompt and found.text == llm.decode(found.tokens)
            assert [next(iter(each)) for each in found.logprobs] == found.tokens[len(prompt) :]
            assert found.score == pytest.approx(found.cum_logprob / len(found.logprobs))
        scores = [found.score for found in output.sequences]
        assert scores == sorted(scores, reverse=True)
    assert llm.beam_search("def f():", params) == outputs[:1]
    for wrong, words in (
        ({"beam_width": 33}, "beam_width is 33"),
        ({"temperature": 0.5}, "temperature is 0.5"),
        ({"max_tokens": 600}, "maximum context length is 512"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.beam_search("def f():", replace(params, **wrong))
