#!/usr/bin/env bash
# Runs the unit tests with the lowest versions that pyproject.toml allows, in a virtual environment of its own below $TMPDIR, which
# is removed afterwards. The last line is pytest's count. Arguments go to pytest, `-n 2` for two files at a time.
# Fails before the tests when a lower bound names a version that another package's requirement rules out: nobody could test it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

extra=cpu
if has_nvidia_gpu; then extra=cuda; fi
venv=$(mktemp -d -t trivet-lowest-XXXXXX)
trap 'rm -rf "$venv"' EXIT
UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_find_links "$(find_python)")}
export UV_FIND_LINKS
uv venv --quiet --allow-existing --python .venv/bin/python "$venv"
echo "lowest: installing the lowest versions with the $extra build into $venv"
# The lowest build of a torch version is the one for CUDA, which a machine without a GPU does not need: take the build of .venv.
# datasets 4.0 allows no later fsspec than 2025.3. uv would choose the newest fsspec first, and then a later datasets.
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
uv pip install --quiet --python "$venv/bin/python" --resolution lowest-direct -r pyproject.toml --extra "$extra" --group dev \
  --constraint <(printf '%s\n' "torch==$torch" "fsspec==2025.3.0")
uv pip install --quiet --python "$venv/bin/python" --no-deps --editable .
"$venv/bin/python" scripts/untested_bounds.py
"$venv/bin/python" -m pytest tests/unit -m "not slow and not gpu and not vllm" -p no:cacheprovider --quiet "$@"
