#!/usr/bin/env bash
# Runs the unit tests, the slow ones too, with branch coverage, and fails below the floor in pyproject.toml. Arguments go to pytest.
# It is no part of scripts/test.sh: counting branches takes the tests of pure Python 1.7 times as long (Python 3.11), and what the
# roles' processes run in integration tests would not be counted.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
exec uv run --no-sync pytest -m "not gpu" -n 3 --dist loadfile --no-loadscope-reorder \
  --cov --cov-report=term:skip-covered tests/unit "$@"
