"""Drives vLLM through its Python API: all prompts of a job at once, times known only at the end."""

from __future__ import annotations

import time

from bench.peers.drivers.lines import read_arguments, serve_jobs, take_answers_pipe
from bench.peers.jobs import Job, JobResult, Served


def main() -> None:
    """Load the model and take jobs."""
    answers = take_answers_pipe()
    arguments = read_arguments(__doc__)
    from vllm import LLM, SamplingParams  # prints while it is imported

    llm = LLM(str(arguments.model), max_model_len=arguments.max_len, dtype="bfloat16")

    def run(job: Job) -> JobResult:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True)
            for n in job.output_lens
        ]
        began_s = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job.prompts], params, use_tqdm=False
        )
        duration_s = time.perf_counter() - began_s
        return JobResult(
            duration_s, [Served(began_s, [], len(output.outputs[0].token_ids)) for output in outputs]
        )

    serve_jobs(answers, run)


if __name__ == "__main__":
    main()
