"""Drives Quintet through its Python API: all prompts of a job at once, times known only at the end."""

from __future__ import annotations

import time

from bench.peers.drivers.lines import read_arguments, serve_jobs, take_answers_pipe
from bench.peers.jobs import Job, JobResult, Served
from quintet import LLM, SamplingParams


def main() -> None:
    """Load the model and take jobs."""
    answers = take_answers_pipe()
    arguments = read_arguments(__doc__)
    flags: dict[str, object] = (
        {} if arguments.quantization is None else {"quantization": arguments.quantization}
    )
    with LLM(
        str(arguments.model),
        threads=arguments.threads,
        max_model_len=arguments.max_len,
        kv_cache_memory=str(arguments.kv_bytes),
        log_level="WARNING",
        **flags,
    ) as llm:

        def run(job: Job) -> JobResult:
            params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in job.output_lens]
            began_s = time.perf_counter()
            outputs = llm.generate(job.prompts, params, use_tqdm=False)
            duration_s = time.perf_counter() - began_s
            return JobResult(
                duration_s, [Served(began_s, [], len(output.outputs[0].token_ids)) for output in outputs]
            )

        serve_jobs(answers, run)


if __name__ == "__main__":
    main()
