# Where things are kept, how a stage is run and told, how to reach the cluster. Sourced by every script here.
set -euo pipefail
CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OFFLINE_DIR=$CLUSTER_DIR/offline
ROOT_DIR=$(cd "$CLUSTER_DIR/../.." && pwd)
# shellcheck source=e2e/cluster/versions.sh
. "$CLUSTER_DIR/versions.sh"

export KVERN_E2E_CACHE=${KVERN_E2E_CACHE:-${HOME:-/root}/.cache/kvern-e2e}
CACHE=$KVERN_E2E_CACHE
RUN=$CACHE/run   # of the cluster that is up: kubeconfig, sockets, logs, times
LOGS=$RUN/logs
TOOLS=$CACHE/tools # links to the versions in use, for PATH
NETNS=kvern-e2e
NODE_IMAGES=/var/kvern-images # where a node of the cluster sees $CACHE/images
export CLUSTER_NAME=${KVERN_E2E_CLUSTER:-kvern-e2e}
mkdir -p "$CACHE/bin" "$TOOLS" "$LOGS"

die() { echo "$*" >&2; exit 1; }

# What a stage found or did, in a few words for the table of times.
note() { [ -z "${STAGE_NOTE:-}" ] || echo "$*" >"$STAGE_NOTE"; }

seconds_since() { LC_ALL=C awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'; }

# stage NAME COMMAND...: the command's output goes to a log, whose end is shown where it fails.
# The command is a program, not a function: bash turns `set -e` off inside whatever is followed by `||`.
stage() {
  local name=$1 log status=0 start=$EPOCHREALTIME took
  shift
  log=$LOGS/$(tr -cs 'a-z0-9\n' '-' <<<"${name,,}").log
  printf '==> %s\n' "$name"
  rm -f "$log.note"
  STAGE_NOTE=$log.note "$@" >"$log" 2>&1 </dev/null || status=$?
  took=$(seconds_since "$start")
  local said=
  [ ! -s "$log.note" ] || said=$(<"$log.note")
  if [ "$status" != 0 ]; then
    tail -n 25 "$log" | sed 's/^/    | /' >&2
    said="FAILED (exit $status), whole log: $log"
  fi
  printf '    %s: %s s%s\n' "$name" "$took" "${said:+  $said}" # with its name: two may run side by side
  printf '%s\t%s\t%s\n' "$name" "$took" "$said" >>"$RUN/stages.tsv"
  return "$status"
}

stage_table() {
  [ -s "$RUN/stages.tsv" ] || return 0
  awk -F '\t' '{ printf "  %-44s %8.1f s  %s\n", $1, $2, $3 }' "$RUN/stages.tsv"
}

# How this machine's cluster is run: "stock" or "offline"; written by cluster.sh up.
mode() { cat "$RUN/mode" 2>/dev/null || echo none; }

# Programs that talk to pods, ClusterIPs or the API server run in the cluster's network namespace where it has one.
in_cluster_net() {
  if [ "$(mode)" = offline ]; then nsenter --net="/run/netns/$NETNS" "$@"; else "$@"; fi
}

use_cluster_engine() {
  if [ "$(mode)" = offline ]; then
    export DOCKER_HOST=unix://$RUN/engine-cluster.sock DOCKER_API_VERSION=1.41
  fi
}

export PATH=$TOOLS:$PATH
export KUBECONFIG=$RUN/kubeconfig
export CACHE RUN LOGS TOOLS NETNS ROOT_DIR CLUSTER_DIR OFFLINE_DIR
