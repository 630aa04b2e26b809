"""lm-eval over completions and chat: each sample equals that of transformers, by likelihood and by text."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

url, model, checkpoint = sys.argv[1:]
QUESTIONS: list[dict[str, Any]] = [
    {"q": "def add(a, b):\n    return a", "choices": [" + b", " - c", "()"], "gold": 0},
    {
        "q": "import json\n\nwith open(path) as",
        "choices": [" handle:", " file:", " nothing at all"],
        "gold": 1,
    },
    {"q": "for i in range(10", "choices": ["):", "]", "}"], "gold": 0},
    {"q": "class Parser:\n    def __init__(", "choices": ["self", "other", "None"], "gold": 0},
]
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{q}}",
    "target_delimiter": "",
}
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
TOLERANCE = 1e-3
"""Tolerance of log-probabilities in fp32: order of summation, and rounding in JSON."""


def evaluate(folder: Path, kind: str, settings: Mapping[str, object], tasks: str, *more: str) -> list[Any]:
    """Return the response to each question of each task."""
    out = folder / f"{kind}-{tasks}-{len(more)}"
    arguments = ",".join(f"{name}={value}" for name, value in settings.items())
    command = [Path(sys.executable).parent / "lm-eval", "run", "--model", kind, "--model_args", arguments]
    where = ["--tasks", tasks, "--include_path", folder, "--log_samples", "--output_path", out]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
    subprocess.run([*command, *where, *more], env=os.environ | offline, check=True)
    files = sorted(out.rglob("samples_*.jsonl"), key=lambda path: path.name.rpartition("_")[0])
    samples = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def is_same(ours: Any, reference: Any) -> bool:
    if isinstance(ours, str):
        return bool(ours == reference)
    if not isinstance(ours[0], list):
        return bool(ours == reference)
    return all(
        abs(float(one[0]) - float(other[0])) < TOLERANCE and one[1] == other[1]
        for one, other in zip(ours, reference, strict=True)
    )


with TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    files = {"dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    for task, settings in TASKS.items():  # JSON is YAML
        (folder / f"{task}.yaml").write_text(json.dumps({"task": task, **COMMON, **files, **settings}))
    local = {"model": model, "num_concurrent": 2, "max_retries": 1}
    completions = local | {"base_url": f"{url}/v1/completions", "tokenizer": checkpoint}
    chat = local | {"base_url": f"{url}/v1/chat/completions"}
    transformers = {"pretrained": checkpoint, "dtype": "float32"}
    answered = evaluate(folder, "local-completions", completions, "choices,text")
    expected = evaluate(folder, "hf", transformers, "choices,text", "--device", "cpu")
    assert len(expected) == 2 * len(QUESTIONS)
    assert all(map(is_same, answered, expected)), (answered, expected)
    answered = evaluate(folder, "local-chat-completions", chat, "text", "--apply_chat_template")
    expected = evaluate(folder, "hf", transformers, "text", "--apply_chat_template", "--device", "cpu")
    assert answered == expected and all(map(len, answered)), (answered, expected)
