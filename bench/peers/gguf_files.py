"""Convert a bf16 GGUF file to other formats with llama.cpp's quantizer.

Runs in the environment of llama-cpp-python.

    python -m bench.peers.gguf_files MODEL-bf16.gguf
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp

from bench.arguments import command_parser

QUANTIZED = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
}


def quantize(source: Path, target: Path, ftype: int) -> None:
    """Write ``source`` in another format. Raises `RuntimeError` if llama.cpp fails."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize({source}, {target}, {ftype}) returned {status}")


def main() -> None:
    """Write all missing formats of a bf16 file of `quintet quantize`."""
    parser = command_parser(__doc__)
    parser.add_argument("plain", type=Path)
    arguments = parser.parse_args()
    plain: Path = arguments.plain
    for precision, ftype in QUANTIZED.items():
        target = plain.with_name(plain.name.replace("bf16", precision))
        if target.exists():
            continue
        partial = target.with_suffix(".partial")
        quantize(plain, partial, ftype)
        partial.rename(target)
        print(target, flush=True)


if __name__ == "__main__":
    main()
