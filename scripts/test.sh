#!/usr/bin/env bash
# Runs the test suite on a fresh machine, without what is marked slow or gpu: installs what is missing, a headless browser too,
# then pytest, three files at a time, those with few long tests first: on two cores two files at a time left a quarter of them idle,
# because tests wait for processes. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
uv run --no-sync python scripts/install_browser.py || echo "test: the tests of the page are skipped"
marks="not slow and not gpu"
if has_nvidia_gpu; then
  # The CUDA build of vLLM serves on a GPU alone, and each of several servers at a time would ask for nine tenths of it.
  export CUDA_VISIBLE_DEVICES=
  marks+=" and not vllm"
  echo "test: this machine has a GPU: tests run on its CPU, without those of a real server. For the others: uv run pytest -m gpu"
fi
exec uv run --no-sync pytest -m "$marks" -n 3 --dist loadfile --no-loadscope-reorder "$@"
