#!/usr/bin/env bash
# Collects the packages that scripts/gpu_check.py needs on a machine with a GPU that has torch, transformers and peft, but no network
# and none of the others. Run it where there is a network; then copy the checkout, with the directory, to the machine with the GPU.
#
#   bash scripts/gpu_bundle.sh [DIRECTORY]      default: .gpu-bundle, which git ignores
#
# The wheels are for x86-64 Linux and Python 3.11 and 3.12. The last lines are the commands for the machine with the GPU.
# Fails when the wheels take more than 40 MiB: a machine that is lent may take little with a command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MAX_MIB=40
bundle=${1:-.gpu-bundle}
# The configuration, messages and digests of the trainer; then what its tests need. Their own requirements come with them.
packages=(pydantic msgspec xxhash tomli-w pyzmq prometheus-client packaging pytest hypothesis)

mkdir -p "$bundle"
rm -f "$bundle"/*.whl
for python in 3.11 3.12; do
  python3 -m pip download --quiet --quiet --dest "$bundle" --only-binary :all: --python-version "$python" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "${packages[@]}"
done

mib=$(du -sm "$bundle" | cut -f1)
if ((mib > MAX_MIB)); then
  echo "gpu_bundle: $bundle has $mib MiB, allowed are $MAX_MIB; find what grew with: ls -lS $bundle" >&2
  exit 1
fi
cat <<END
gpu_bundle: $(find "$bundle" -name '*.whl' | wc -l) wheels, $mib MiB in $bundle. On the machine with the GPU, in the checkout:
  python3 -m pip install --quiet --no-index --find-links $bundle --target .gpu-packages ${packages[*]}
  PYTHONPATH=src:.gpu-packages python3 scripts/gpu_check.py --device cuda --record gpu_check.json
END
