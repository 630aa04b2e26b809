"""Driver of vLLM by its Python API: all prompts of a job in one call, without times of single tokens."""

from __future__ import annotations

import time

from bench.peers.drivers.json_lines import read_arguments, serve_jobs, take_output_pipe
from bench.peers.jobs import Job, JobResult, Served


def main() -> None:
    """Load the model and run jobs."""
    result_pipe = take_output_pipe()
    arguments = read_arguments(__doc__)
    from vllm import LLM, SamplingParams  # its import prints to stdout

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

    serve_jobs(result_pipe, run)


if __name__ == "__main__":
    main()
