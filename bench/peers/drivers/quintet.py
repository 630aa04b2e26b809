"""Driver of Quintet by its Python API: all prompts of a job in one call, without times of single tokens."""

from __future__ import annotations

import time

from bench.peers.drivers.json_lines import read_arguments, serve_jobs, take_output_pipe
from bench.peers.jobs import Job, JobResult, Served
from quintet import LLM, SamplingParams


def main() -> None:
    """Load the model and run jobs."""
    result_pipe = take_output_pipe()
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

        serve_jobs(result_pipe, run)


if __name__ == "__main__":
    main()
