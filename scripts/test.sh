#!/usr/bin/env bash
# Runs the whole test suite on a fresh machine: installs what is missing, then pytest. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
exec uv run --no-sync pytest -m "not slow and not gpu" "$@"
