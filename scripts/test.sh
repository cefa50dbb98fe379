#!/usr/bin/env bash
# Runs the default suite on a fresh machine: installs what is missing, a headless browser too, then pytest without what is marked
# slow or gpu. With --slow as the first argument: the slow tests, whose ends are recorded in docs/slow_tests.json.
# Three files at a time: on two cores two left a quarter of them idle, because tests wait for processes. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
uv run --no-sync python scripts/install_browser.py || echo "test: the tests of the page are skipped"
marks="not slow and not gpu"
if [[ ${1:-} == --slow ]]; then
  marks="slow and not gpu"
  set -- --record=docs/slow_tests.json "${@:2}" # with "=": pytest takes a separate word for a path until it knows the option
fi
if has_nvidia_gpu; then
  # The CUDA build of vLLM serves on a GPU alone, and each of several servers at a time would ask for nine tenths of it.
  export CUDA_VISIBLE_DEVICES=
  marks+=" and not vllm"
  echo "test: this machine has a GPU: tests run on its CPU, without those of a real server. For the others: uv run pytest -m gpu"
fi
exec uv run --no-sync pytest -m "$marks" -n 3 --dist loadfile --no-loadscope-reorder "$@"
