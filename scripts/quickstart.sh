#!/usr/bin/env bash
# The first command of a newcomer: installs what is missing, then teaches a tiny model to reverse texts by reinforcement learning.
#
#   bash scripts/quickstart.sh [--seed N] [--output-dir DIR]
#
# Phases: start model and warm-up data, supervised warm-up, reinforcement learning, measurement on held-out texts.
# Nothing is downloaded but packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SEED=0
OUT=outputs/quickstart
while (($#)); do
  case $1 in
    --seed) SEED=${2:?--seed needs a number}; shift 2 ;;
    --output-dir) OUT=${2:?--output-dir needs a directory}; shift 2 ;;
    *) echo "usage: bash scripts/quickstart.sh [--seed N] [--output-dir DIR]; got $1" >&2; exit 2 ;;
  esac
done

# Where roles share a few cores, a waiting thread must sleep, not spin. The rest keeps the screen to what matters.
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TQDM_DISABLE=1 COLUMNS=${COLUMNS:-120}
SERVER=

# Run a phase under its name, and say how long it took.
phase() {
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$@"
  echo "== $name took $((SECONDS - started)) s"
}

last_step() { printf '%s\n' "$1"/weights/step_* | sort -t_ -k2 -n | tail -n 1; }

make_start() {
  mkdir -p "$OUT"
  rm -rf "$OUT"/{start,sft,run} "$OUT/sft.jsonl"
  python scripts/make_reverse_text_sft.py "$OUT/sft.jsonl" --seed "$SEED"
  python scripts/make_tiny_model.py "$OUT/start" --seed "$SEED"
}

warm_up() {
  sft @ configs/quickstart/sft.toml --seed "$SEED" --output-dir "$OUT/sft" --model.name "$OUT/start" --data.name "$OUT/sft.jsonl"
}

reinforce() {
  rl @ configs/quickstart/rl.toml --seed "$SEED" --output-dir "$OUT/run" --model.name "$(last_step "$OUT/sft")"
}

stop_server() {
  [[ -z $SERVER ]] && return
  kill "$SERVER" 2>/dev/null || true
  wait "$SERVER" 2>/dev/null || true
  SERVER=
}

measure() {
  local port last
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  last=$(last_step "$OUT/run")
  inference @ "$OUT/run/configs/inference.toml" --server.port "$port" >"$OUT/run/logs/measure.stdout" 2>&1 &
  SERVER=$!
  .venv/bin/eval @ configs/quickstart/eval.toml --client.base-url "http://127.0.0.1:$port/v1" --weights-dir "$OUT/run/weights" --steps "${last##*_}"
  stop_server
}

trap stop_server EXIT
source scripts/install.sh
PATH="$PWD/.venv/bin:$PATH"
phase "start model and warm-up data" make_start
phase "supervised warm-up" warm_up
phase "reinforcement learning" reinforce
phase "measurement on held-out texts" measure
python scripts/quickstart_report.py "$OUT"
echo "== everything took $SECONDS s"
