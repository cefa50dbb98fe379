#!/usr/bin/env bash
# A real SLURM cluster on this machine, to try `[slurm]` on and for the tests: slurmctld and slurmd of Debian's slurm-wlm, each node a
# network, host name and mount namespace with a munged of its own. Needs root, and installs what is missing by apt-get.
#
#   bash scripts/slurm_cluster.sh up [NODES]        make the cluster: a controller and NODES nodes, 2 by default
#   bash scripts/slurm_cluster.sh run COMMAND…      run a command on the controller: run sinfo, run sbatch FILE, run uv run rl @ …
#   bash scripts/slurm_cluster.sh node N COMMAND…   run a command on node N
#   bash scripts/slurm_cluster.sh down              end all of it
#
# All nodes see this machine's files. Each has its cores, half of its memory and eight GPUs that are empty files. State and logs are
# in $SLURM_CLUSTER_DIR, /tmp/trivet-slurm by default, a path of at most 67 characters. The kernel must
# have the controllers of cgroup v1, which this release of slurmd needs.
set -euo pipefail

umask 077
state=${SLURM_CLUSTER_DIR:-/tmp/trivet-slurm}
network=10.213.77
wait_s=30
# A socket's path has at most 107 characters, and slurmstepd adds up to 40: /node99.spool/node99_JOB.STEP. Beyond that it dies.
max_state_length=67

fail() { echo "slurm_cluster: $*" >&2; exit 1; }

require() {
  [[ $(id -u) == 0 ]] || fail "making namespaces needs root"
  local missing=()
  for program in slurmctld slurmd munged ip nsenter unshare; do command -v "$program" > /dev/null || missing+=("$program"); done
  [[ ${#missing[@]} == 0 ]] && return
  echo "slurm_cluster: installing slurm-wlm and munge: ${missing[*]} are not here" >&2
  { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge iproute2; } > "$state/apt.log" 2>&1 ||
    fail "the installation failed, see $state/apt.log"
}

# Print when a process started, in clock ticks after boot; nothing when there is none.
started() { awk '{sub(/.*\) /, ""); print $20}' "/proc/$1/stat" 2> /dev/null || true; }

# Start a process that outlives this script, and note its id. Arguments: name of its log, command.
keep() {
  local name=$1
  shift
  setsid "$@" > "$state/$name.log" 2>&1 < /dev/null &
  # With its start, so that a number that another process has by then is left alone.
  echo "$! $(started "$!")" >> "$state/pids"
}

inside() {
  local name=$1
  shift
  # cat, because $(< FILE) ends the script when the file is missing, even where a failure is allowed.
  nsenter --target "$(cat "$state/$name.pid")" --net --mount --uts --wd="$PWD" env SLURM_CONF="$state/slurm.conf" "$@"
}

# Make the namespaces of one machine and connect them to the switch. Arguments: name, last part of the address.
make_machine() {
  local name=$1 number=$2
  keep "$name.holder" unshare --net --mount --uts --propagation private sleep infinity
  local pid=$!
  echo "$pid" > "$state/$name.pid"
  local deadline=$((SECONDS + wait_s))
  # Once the program is sleep, unshare has made all namespaces, and mounts are private.
  until [[ $(cat "/proc/$pid/comm" 2> /dev/null) == sleep ]]; do
    kill -0 "$pid" 2> /dev/null || fail "the namespaces of $name were refused, see $state/$name.holder.log; then: slurm_cluster.sh down"
    ((SECONDS < deadline)) || fail "the namespaces of $name are not there after $wait_s s, see $state/$name.holder.log"
    sleep 0.02
  done
  if [[ $name == switch ]]; then
    inside "$name" ip link add bridge type bridge
    inside "$name" ip link set bridge up
    return
  fi
  inside switch ip link add "port$number" type veth peer name eth0 netns "$pid"
  inside switch ip link set "port$number" master bridge up
  inside "$name" bash -euc "
    hostname $name
    mount --bind $state/hosts /etc/hosts
    mount -t tmpfs tmpfs /run
    mkdir -p /run/munge /run/slurm
    mount -t tmpfs tmpfs /sys/fs/cgroup
    for controller in freezer cpuset memory devices cpuacct; do
      mkdir /sys/fs/cgroup/\$controller
      mount -t cgroup -o \$controller cgroup /sys/fs/cgroup/\$controller
    done
    ip link set lo up
    ip address add $network.$number/24 dev eth0
    ip link set eth0 up"
  keep "$name.munged" nsenter --target "$pid" --net --mount --uts munged --foreground --force --key-file="$state/munge.key" \
    --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
}

write_configuration() {
  local count=$1 memory_mib
  memory_mib=$(($(awk '/^MemTotal/ {print $2}' /proc/meminfo) / 2048))
  head -c 1024 /dev/urandom > "$state/munge.key"
  chmod 400 "$state/munge.key"
  {
    echo "127.0.0.1 localhost"
    echo "$network.254 controller"
    for ((i = 1; i <= count; i++)); do echo "$network.$i node$i"; done
  } > "$state/hosts"
  mkdir -p "$state/gpus" "$state/controller_state"
  for i in 0 1 2 3 4 5 6 7; do : > "$state/gpus/gpu$i"; done
  cat > "$state/slurm.conf" <<CONF
ClusterName=trivet
SlurmctldHost=controller($network.254)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation=$state/controller_state
SlurmdSpoolDir=$state/%n.spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.%n.pid
PartitionName=debug Nodes=node[1-$count] Default=YES MaxTime=INFINITE State=UP
CONF
  for ((i = 1; i <= count; i++)); do
    echo "NodeName=node$i NodeAddr=$network.$i CPUs=$(nproc) SocketsPerBoard=1 CoresPerSocket=$(nproc) ThreadsPerCore=1" \
      "RealMemory=$memory_mib Gres=gpu:8"
  done >> "$state/slurm.conf"
  printf 'AutoDetect=off\nName=gpu File=%s/gpus/gpu[0-7]\n' "$state" > "$state/gres.conf"
  printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n' > "$state/cgroup.conf"
}

up() {
  local count=${1:-2}
  [[ $count =~ ^[1-9][0-9]?$ ]] || fail "up takes a number of nodes from 1 to 99, not '$count'"
  [[ ! -e $state/pids ]] || fail "there is a cluster in $state already; end it with: bash scripts/slurm_cluster.sh down"
  ((${#state} <= max_state_length)) ||
    fail "$state is too long for the sockets of SLURM; set SLURM_CLUSTER_DIR to a path of at most $max_state_length characters"
  mkdir -p "$state"
  [[ -O $state && ! -L $state ]] || fail "$state is somebody else's; set SLURM_CLUSTER_DIR to another directory"
  require
  : > "$state/pids"
  trap 'echo "slurm_cluster: failed; the logs are in $state" >&2' ERR
  write_configuration "$count"
  make_machine switch 0
  make_machine controller 254
  for ((i = 1; i <= count; i++)); do make_machine "node$i" "$i"; done
  keep slurmctld nsenter --target "$(< "$state/controller.pid")" --net --mount --uts env SLURM_CONF="$state/slurm.conf" slurmctld -D -c
  for ((i = 1; i <= count; i++)); do
    mkdir -p "$state/node$i.spool"
    keep "slurmd.node$i" nsenter --target "$(< "$state/node$i.pid")" --net --mount --uts \
      env SLURM_CONF="$state/slurm.conf" slurmd -D -N "node$i"
  done
  local deadline=$((SECONDS + wait_s))
  until [[ $(inside controller sinfo --noheader --format=%T --states=idle --Node 2> /dev/null | wc -l) == "$count" ]]; do
    ((SECONDS < deadline)) || fail "the nodes are not idle after $wait_s s; see the logs in $state"
    sleep 0.3
  done
  inside controller sinfo
}

# Print the network namespaces of the live processes that `keep` started, but never this script's own.
namespaces() {
  local pid since own found
  own=$(readlink /proc/self/ns/net)
  while read -r pid since; do
    [[ -n $since && $(started "$pid") == "$since" ]] || continue
    found=$(readlink "/proc/$pid/ns/net") || continue
    [[ $found == "$own" || $found == "$(readlink /proc/1/ns/net)" ]] || echo "$found"
  done < "$state/pids" | sort -u
}

# Print the processes in network namespaces. Argument: the namespaces, one on each line.
processes_in() {
  local found
  for directory in /proc/[0-9]*; do
    found=$(readlink "$directory/ns/net" 2> /dev/null) || continue
    if [[ -n $found && $'\n'$1$'\n' == *$'\n'"$found"$'\n'* ]]; then echo "${directory#/proc/}"; fi
  done
}

down() {
  [[ -e $state/pids ]] || fail "there is no cluster in $state"
  # Jobs first: their processes leave the group of the slurmd that started them.
  inside controller timeout 10 scancel --user=root 2> /dev/null || true
  local deadline=$((SECONDS + wait_s))
  while [[ -n $(inside controller timeout 10 squeue --noheader 2> /dev/null) ]]; do
    ((SECONDS < deadline)) || fail "jobs do not end within $wait_s s; look with: bash scripts/slurm_cluster.sh run squeue"
    sleep 0.3
  done
  local of_nodes
  of_nodes=$(namespaces)
  for signal in TERM KILL; do
    tac "$state/pids" | while read -r pid since; do
      [[ -z $since || $(started "$pid") != "$since" ]] || kill -s "$signal" -- "-$pid" 2> /dev/null || true
    done
    # If slurmctld has died, it cancelled no job, and the processes of jobs are in none of the groups above.
    for pid in $(processes_in "$of_nodes"); do kill -s "$signal" "$pid" 2> /dev/null || true; done
    sleep 1
  done
  rm -rf "$state"
}

case ${1:-} in
  up) up "${2:-2}" ;;
  run) shift; [[ -e $state/pids ]] || fail "there is no cluster in $state; make one: bash scripts/slurm_cluster.sh up"; inside controller "$@" ;;
  node) number=$2; shift 2; inside "node$number" "$@" ;;
  down) down ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
