#!/usr/bin/env bash
# The first command of a newcomer: installs what is missing, then teaches a tiny model to reverse texts by reinforcement learning.
#
#   bash scripts/quickstart.sh [--seed N] [--output-dir DIR]
#
# The arguments go to `trivet quickstart`, which does the training. Nothing is downloaded but packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh
exec .venv/bin/trivet quickstart "$@"
