#!/usr/bin/env bash
# Rehearses a stage of bench/gpu/remote.sh without a GPU, on toy shapes: in a copy of the transferred files, without git and without a
# network, with the package versions of the GPU machine. Needs build/gpu of bench/gpu/prepare.sh, python3.12, and 6 GB of disk.
#
#   bash bench/gpu/rehearse.sh [STAGE] [SECONDS]     default: a 300
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:-a} seconds=${2:-300}
python=${PYTHON312:-python3.12}
environment=${REHEARSAL_ENV:-$PWD/.venv/gpu-rehearsal}
if [ ! -x "$environment/bin/pytest" ]; then
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet --disable-pip-version-check torch==2.11.0 transformers==5.17.0 tokenizers==0.23.2 \
    cupy-cuda13x==14.2.0 triton==3.6.0 numpy uvloop pyyaml psutil prometheus-client safetensors tqdm jinja2 \
    huggingface-hub hypothesis pytest anyio click h11
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -d -t "$copy"
mkdir -p "$copy/build"
cp -r build/gpu "$copy/build/gpu"
cd "$copy"
offline=()
if unshare --net true 2> /dev/null; then offline=(unshare --net); else echo "unshare is not permitted: the rehearsal keeps the network"; fi
export OUT=${OUT:-$OLDPWD/build/gpu-out} PATH=$environment/bin:$PATH
"${offline[@]}" bash -c "ip link set lo up 2> /dev/null; exec timeout -k 20 $((seconds + 10)) \
  bash bench/gpu/remote.sh $stage $seconds $(cat build/gpu/commit) cpu"
