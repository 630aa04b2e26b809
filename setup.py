"""Builds the host kernels of csrc/cpu; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Plain C ABI, loaded with ctypes (quintet.executor.ops.host_library), so no Python headers and no torch are
        # needed. Optional: where it does not compile, the package installs without it and computes with torch.
        Extension(
            "quintet.executor.ops._host",
            sources=[
                "csrc/cpu/linear.cpp",
                "csrc/cpu/paged_attention.cpp",
                "csrc/cpu/pointwise.cpp",
                "csrc/cpu/support.cpp",
            ],
            depends=["csrc/cpu/host.hpp"],
            language="c++",
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-fopenmp",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                # GCC 12 warns of its own AVX-512 header, whose undefined vectors initialise themselves.
                "-Wno-uninitialized",
                "-Wno-maybe-uninitialized",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
