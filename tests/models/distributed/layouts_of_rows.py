"""Supported layouts of the rows of `tests.models.test_equal`: ranks, their division, and shared KV; stages support all
rows.

`tests/models/distributed/test_rejected_layouts.py` compares the names with the rejected layouts.
"""

from __future__ import annotations

from tests.models.test_equal import ROWS

STATES = (
    *("mamba", "mamba, biases, untied", "falcon mamba", "jamba", "jamba, experts"),
    *("mamba2", "mamba2, one group, limits", "bamba", "nemotron h"),
    *("granite hybrid", "granite hybrid, experts", "granite hybrid, positions"),
    *("falcon h1", "falcon h1, normed", "falcon h1, normed first"),
    *("qwen3 next", "qwen3 next, biases, some layers without experts"),
    *("qwen 3.5", "qwen 3.5, with vision", "qwen-moe 3.5"),
    *("lfm2", "lfm2 moe", "lfm2, biases, width as it is"),
)
"""Each rank keeps its own state: no sharing."""
FIVE_HEADS = ("baichuan 13b",)
WHOLE_EXPERTS = ("gpt-oss", "gpt-oss, 4 bits")
"""Columns of their experts are not divided, whole experts are."""
HEADS_AND_EXPERTS = (
    *("deepseek v2, groups", "deepseek v2, queries at once", "deepseek v3", "deepseek v3, as glm 4.7 flash"),
    *("deepseek v3, rotated by halves, biases", "ernie 4.5 moe", "flex olmo", "glm4 moe", "glm4 moe, as dots"),
    *("glm4 moe, as exaone", "glm4 moe, as ling 2", "glm4 moe, as solar open", "granite hybrid, experts"),
    *("granite moe", "granite moe, as deepseek 1", "granite moe, as ling", "granite moe, shared expert"),
    *("hunyuan moe", "jamba, experts", "lfm2 moe", "qwen3 next", "qwen-moe 3.5"),
    *("qwen3 next, biases, some layers without experts", "llama4", "llama4, with vision"),
    *("minimax m2", "mixtral", "olmoe", "phi moe", "phi moe, stretched", "qwen2 moe"),
    *("qwen3 moe, some layers without experts",),
)  # fmt: skip
"""Columns of experts are divided, and whole experts."""
AS_MANY_KV_HEADS = (
    *("baichuan 2 7b", "baichuan 7b", "biogpt", "bloom", "bloom, heads no power of two", "codegen", "falcon rw"),
    *("bloom, residuals behind norms", "gpt2", "gpt2, shrinking scores, untied", "gpt_neo", "gpt_neox", "gptj"),
    *("gpt_bigcode, as many KV heads as heads", "gpt_neox, one after the other", "internlm", "opt", "opt 350m"),
    *("llama, as many KV heads as heads", "mpt", "mpt, heads no power of two, clipped", "opt, galactica"),
    *("persimmon", "phi, normed queries", "qwen 1", "xglm"),
)  # fmt: skip
"""Rows in which each of four ranks reads a different KV head."""
ONE_KV_HEAD = (
    *("deepseek v2, groups", "deepseek v2, queries at once", "deepseek v3", "deepseek v3, as glm 4.7 flash"),
    *("deepseek v3, as youtu", "deepseek v3, rotated by halves, biases", "minicpm3"),
    *("falcon 7b", "gpt_bigcode", "llama, one KV head, tied"),
)
"""All ranks read the one KV head, or the latents."""
DIVIDED = tuple(name for name in ROWS if name not in {*FIVE_HEADS, *WHOLE_EXPERTS})
"""Rows that ``--tensor-parallel-size`` 2 and 4 divides."""
DIVIDED_BY_EXPERTS = tuple(name for name in ROWS if name in {*WHOLE_EXPERTS, *HEADS_AND_EXPERTS})
"""Rows that ``--enable-expert-parallel`` divides."""
INVARIANT = {name: name in DIVIDED_BY_EXPERTS for name in ROWS if name in {*DIVIDED, *WHOLE_EXPERTS}}
"""Rows for ``--layout-invariant``; True: with ``--enable-expert-parallel``, for rows with experts."""
KEPT_TOGETHER = {
    (2, 2): ONE_KV_HEAD,
    (4, 2): tuple(name for name in DIVIDED if name not in {*AS_MANY_KV_HEADS, *STATES}),
    (4, 4): ONE_KV_HEAD,
}
"""Number of ranks, and ``--decode-context-parallel-size``."""
