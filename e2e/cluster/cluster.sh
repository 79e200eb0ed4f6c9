#!/bin/bash
# The cluster of the end-to-end tests.
#
#   cluster.sh up [--no-images]   a kind cluster with metrics-server, fake GPUs and the project's images loaded;
#                                 --no-engine leaves the large one to `cluster.sh load`
#   cluster.sh down               takes all of it away; only the cache folder stays
#   cluster.sh exec COMMAND...    runs a command where the cluster can be reached, with KUBECONFIG and PATH set
#   cluster.sh load               loads images that the cluster that is up lacks
#   cluster.sh images             builds the images anew and loads them into the cluster that is up
#   cluster.sh diagnose           what a failed test wants to know: pods, events, conditions, logs
#   cluster.sh times              the table of times of the last run
#
# kind runs its stock node image where a Docker engine is there and can pull it, else an image built on the spot, in a
# Docker engine and a network namespace of its own (root, Debian packages, Go modules; no image registry).
# KVERN_E2E_NODE=stock|offline decides instead. Everything is kept under KVERN_E2E_CACHE (~/.cache/kvern-e2e).
. "$(dirname "$0")/lib.sh"

choose_mode() {
  local wanted=${KVERN_E2E_NODE:-auto} why
  case $wanted in
    stock | offline) why="KVERN_E2E_NODE says so" ;;
    auto)
      if ! timeout 10 docker info >/dev/null 2>&1; then
        wanted=offline why="there is no Docker engine here"
      elif docker image inspect "$STOCK_NODE_IMAGE" >/dev/null 2>&1; then
        wanted=stock why="$STOCK_NODE_IMAGE is here"
      elif timeout 300 docker pull -q "$STOCK_NODE_IMAGE" >/dev/null 2>&1; then
        wanted=stock why="$STOCK_NODE_IMAGE was pulled"
      else
        wanted=offline why="$STOCK_NODE_IMAGE cannot be pulled"
      fi ;;
    *) die "KVERN_E2E_NODE=$wanted: it is stock, offline or auto" ;;
  esac
  if [ "$wanted" = offline ] && [ "$(id -u)" != 0 ]; then
    die "the node image is built here because $why; that needs root"
  fi
  echo "==> node image: $wanted, because $why"
  echo "$wanted" >"$RUN/mode"
}

# Programs that are on PATH in the right version need not be built; which they are is left to their owner. Helm 3 is
# for make e2e-full: nothing of it is shared with the others.
groups_wanted() {
  local groups=()
  if [ "$(mode)" = offline ]; then
    echo control kind helm node metrics ${KVERN_E2E_FULL:+helm3}
    return
  fi
  command -v kind >/dev/null || groups+=(kind)
  command -v kubectl >/dev/null || groups+=(kubectl)
  command -v helm >/dev/null || groups+=(helm)
  echo "${groups[@]}" metrics
}

up() {
  local image=stock
  building=
  : >"$RUN/stages.tsv"
  if [ -e "$RUN/mode" ]; then down >/dev/null; fi # a leftover of an earlier run
  choose_mode
  [ "$(mode)" != offline ] || stage "program of the Docker engines" "$OFFLINE_DIR/binaries.sh" engine
  if [ "${1:-}" != --no-images ]; then # beside everything else, much of which is waiting
    build_images &
    building=$!
    trap 'wait "$building" || true' EXIT # where something else fails
  fi
  # shellcheck disable=SC2046
  stage "programs" "$OFFLINE_DIR/binaries.sh" $(groups_wanted)
  if [ "$(mode)" = offline ]; then
    stage "root file system of the node" "$OFFLINE_DIR/rootfs.sh" node
    stage "Docker engine of the cluster" "$OFFLINE_DIR/engine.sh" start cluster
    stage "node image" "$OFFLINE_DIR/node.sh"
    image=$("$OFFLINE_DIR/node.sh" --tag)
  fi
  stage "kind cluster" "$CLUSTER_DIR/kind.sh" "$image"
  stage "metrics-server" "$CLUSTER_DIR/addons.sh"
  [ -n "$building" ] || return 0
  trap - EXIT
  wait "$building"
  if [ "${1:-}" = --no-engine ]; then
    stage "loading the small images" "$CLUSTER_DIR/images.sh" load operator client
  else
    stage "loading images" "$CLUSTER_DIR/images.sh" load
  fi
}

build_images() {
  if [ "$(mode)" = offline ]; then
    stage "root file system of the images" "$OFFLINE_DIR/rootfs.sh" python
    stage "Docker engine for builds" "$OFFLINE_DIR/engine.sh" start build
  fi
  local status=0
  stage "images" "$CLUSTER_DIR/images.sh" build || status=$?
  [ "$(mode)" != offline ] || "$OFFLINE_DIR/engine.sh" stop build
  return $status
}

down() {
  local was
  was=$(mode)
  [ "$was" != none ] || { echo "==> there is no cluster"; return 0; }
  stage "taking the cluster away" "$CLUSTER_DIR/teardown.sh"
  rm -f "$RUN/mode"
}

case ${1:-} in
  up) up "${2:-}" ;;
  down) down ;;
  exec)
    [ "$(mode)" != none ] || die "there is no cluster; make cluster"
    in_cluster_net "${@:2}" ;;
  images)
    [ "$(mode)" != none ] || die "there is no cluster; make cluster"
    build_images
    stage "loading images" "$CLUSTER_DIR/images.sh" load ;;
  load) stage "loading images" "$CLUSTER_DIR/images.sh" load ;;
  diagnose) in_cluster_net "$CLUSTER_DIR/diagnose.sh" ;;
  times) stage_table ;;
  *) sed -n '2,/^\. /{s/^# \{0,1\}//;/^\. /!p}' "$0" >&2; exit 2 ;;
esac
