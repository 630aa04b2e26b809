#!/usr/bin/env bash
# Builds the files for a GPU machine without a network, into build/gpu (about 25 MB): wheels for its Python, kernels compiled for
# its GPUs, the host library. Needs no GPU. Then copy the checkout with build/gpu to the machine and run bench/gpu/remote.sh.
#
#   bash bench/gpu/prepare.sh [PYTHON_VERSION] [SM]     default: 3.12 90 (H100, H200)
set -euo pipefail
cd "$(dirname "$0")/../.."
python_version=${1:-3.12}
sm=${2:-90}
abi=cp${python_version/./}
out=build/gpu

make kernels  # all instruction sets, since the GPU machine has another processor
make cubins COMPILERS=nvrtc ARGS="--only nvrtc --targets $sm"
rm -rf "$out"
mkdir -p "$out/wheels" "$out/cubins"

# Dependencies that the machine's image lacks, in the versions of the tests.
packages=$(grep -iE '^(msgspec|pyzmq|starlette|uvicorn|httptools|setproctitle|llguidance|gguf)==' constraints.txt)
platforms=()
for glibc in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
# shellcheck disable=SC2086  # one word per package
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version "$python_version" --implementation cp "${platforms[@]}" --dest "$out/wheels" $packages

cp -r "executor/backends/cuda/cubins/sm_$sm" "$out/cubins/"
# The library has a plain C ABI, so that it works with each version of Python.
suffix=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
cp "executor/backends/cpu/ops/_host$suffix" "$out/_host.cpython-${abi#cp}-x86_64-linux-gnu.so"
git rev-parse --short HEAD > "$out/commit"
bash bench/gpu/sources.sh > "$out/sources"
du -sh "$out"
echo "copy the checkout with $out to the GPU machine, and run there: bash bench/gpu/remote.sh a 330 $(cat "$out/commit")"
