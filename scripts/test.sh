#!/usr/bin/env bash
# Runs the test suite on a fresh machine, without what is marked slow or gpu: installs what is missing, a headless browser too,
# then pytest, three files at a time, those with few long tests first: on two cores two files at a time left a quarter of them idle,
# because tests wait for processes. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
uv run --no-sync python scripts/install_browser.py || echo "test: the tests of the page are skipped"
exec uv run --no-sync pytest -m "not slow and not gpu" -n 3 --dist loadfile --no-loadscope-reorder "$@"
