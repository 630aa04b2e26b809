#!/usr/bin/env bash
# Runs one stage on a GPU machine without a network, from a checkout with the build/gpu of bench/gpu/prepare.sh.
#
#   bash bench/gpu/remote.sh a 330 COMMIT      smoke test, correctness, one profile
#   bash bench/gpu/remote.sh b 400 COMMIT      decode and prefill grid, kernel rates, HTTP, kills
#   bash bench/gpu/remote.sh a 300 COMMIT cpu  a rehearsal on toy shapes, without a GPU
#
# Writes summary.txt, results.json, logs.tar.gz and, in stage a, trace.json.gz to $OUT (default build/gpu-out).
set -uo pipefail
stage=${1:?stage: a or b} seconds=${2:?seconds} commit=${3:-unknown} device=${4:-cuda}
begun=$(date +%s)
cd "$(dirname "$0")/../.."
[ -f build/gpu/commit ] || { echo "build/gpu is missing or incomplete: run bench/gpu/prepare.sh and copy it here"; exit 2; }
[ "$(bash bench/gpu/sources.sh)" = "$(cat build/gpu/sources)" ] || { echo "build/gpu was built from other kernel sources: run bench/gpu/prepare.sh again"; exit 2; }
export OUT=${OUT:-$PWD/build/gpu-out} PYTHONUNBUFFERED=1
mkdir -p "$OUT"
site=${TMPDIR:-/tmp}/quintet-site
timeout 60 python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
  build/gpu/wheels/*.whl || echo "wheels could not be installed: rows that need them are skipped"
mkdir -p executor/backends/cuda/cubins
cp -r build/gpu/cubins/sm_* executor/backends/cuda/cubins/
cp build/gpu/_host.cpython-*.so executor/backends/cpu/ops/
export PYTHONPATH=$PWD:$PWD/src:$site
exec python3 -m bench.gpu.stages "$stage" --seconds "$seconds" --elapsed "$(($(date +%s) - begun))" --out "$OUT" \
  --commit "$commit" --device "$device"
