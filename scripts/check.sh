#!/usr/bin/env bash
# Checks what no test does: lint, format, types, that the page of models is up to date, and that the site builds.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
uv run --no-sync ruff check
uv run --no-sync ruff format --check
uv run --no-sync pyright
uv run --no-sync python scripts/docs_models.py --check
NO_MKDOCS_2_WARNING=1 uv run --no-sync mkdocs build --strict --quiet
