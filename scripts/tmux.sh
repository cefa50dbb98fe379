#!/usr/bin/env bash
# Log panes of a run in tmux: trainer, orchestrator, inference, environments. They follow files that do not exist yet, too.
# usage: bash scripts/tmux.sh [-s session] [-o output_dir]
set -euo pipefail

usage() { echo "usage: bash scripts/tmux.sh [-s session] [-o output_dir]   (defaults: trivet, outputs)"; }

session=trivet
output_dir=outputs
while getopts "s:o:h" option; do
    case "$option" in
        s) session=$OPTARG ;;
        o) output_dir=$OPTARG ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
if (($#)); then
    echo "error: unexpected argument '$1'" >&2
    usage >&2
    exit 2
fi
if [[ -z $session || $session == *[.:]* ]]; then
    echo "error: session '$session' must not be empty or contain '.' or ':', which tmux uses to address windows" >&2
    exit 2
fi
if ! command -v tmux >/dev/null; then
    echo "error: tmux is not installed; install it with 'sudo apt-get install tmux' (Debian, Ubuntu)," \
        "'sudo dnf install tmux' (Fedora) or 'brew install tmux', or follow the logs without it:" \
        "tail -F $output_dir/logs/*.stdout" >&2
    exit 1
fi

# A new environment's log appears when its worker starts, so the list of files is read again every few seconds.
environments_pane() {
    cat <<'SCRIPT'
follower=; known=
trap 'kill $follower 2>/dev/null' EXIT
echo "waiting for $1/*.log"
while true; do
    found=$(ls "$1"/*.log 2>/dev/null || true)
    if [ "$found" != "$known" ]; then
        [ -n "$follower" ] && kill $follower
        tail -n 20 -F "$1"/*.log & follower=$!
        known=$found
    fi
    sleep 2
done
SCRIPT
}

attach() {
    if [[ ! -t 0 || ! -t 1 ]]; then
        echo "session '$session' is running; attach with: tmux attach -t $session"
    elif [[ -n ${TMUX:-} ]]; then
        exec tmux switch-client -t "=$session"
    else
        exec tmux attach -t "=$session"
    fi
}

if tmux has-session -t "=$session" 2>/dev/null; then
    echo "session '$session' exists already; end it with: tmux kill-session -t $session"
    attach
    exit 0
fi

logs=$(realpath -m -- "$output_dir")/logs
pane=$(tmux new-session -d -s "$session" -n logs -x 200 -y 50 -P -F '#{pane_id}' tail -n 200 -F -- "$logs/trainer.stdout")
tmux select-pane -t "$pane" -T trainer
add_pane() { # title, command…
    pane=$(tmux split-window -d -t "$pane" -P -F '#{pane_id}' "${@:2}")
    tmux select-pane -t "$pane" -T "$1"
    tmux select-layout -t "$pane" even-vertical
}
add_pane orchestrator tail -n 200 -F -- "$logs/orchestrator.stdout"
add_pane inference tail -n 200 -F -- "$logs/inference.stdout"
add_pane environments bash -c "$(environments_pane)" environments "$logs/env_workers"
tmux set-option -w -t "$pane" pane-border-status top
tmux set-option -w -t "$pane" pane-border-format ' #{pane_title} '
tmux set-option -w -t "$pane" remain-on-exit on
attach
