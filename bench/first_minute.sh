#!/usr/bin/env bash
# Measures `git clone` and `make serve` up to the first healthy response, and the CPU time of all processes.
#
#   bash bench/first_minute.sh [PORT]     default: 8199; the clone is deleted at the end
set -euo pipefail
port=${1:-8199}
source=$(cd "$(dirname "$0")/.." && pwd)
clone=$(mktemp -d)
trap 'kill -- -"$job" 2> /dev/null || true; rm -rf "$clone"' EXIT
begun=$(date +%s.%N)
git clone --quiet "$source" "$clone/quintet"
set -m
(cd "$clone/quintet" && TIMEFORMAT='CPU: %U s user, %S s system' && time make serve ARGS="--port $port") > "$clone/log" 2>&1 &
job=$!
set +m
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
  kill -0 "$job" 2> /dev/null || { cat "$clone/log"; exit 1; }
  sleep 0.2
done
echo "ready after $(echo "$(date +%s.%N) - $begun" | bc) s"
pkill -TERM -g "$job" -f quintet-supervisor
wait "$job" || true
grep '^CPU:' "$clone/log"
