#!/bin/bash
# images.sh build|load [NAME...]: the images of the project from its Dockerfiles, and a client for the tests, as kvern/*:e2e.
# build leaves them in a Docker engine and as archives in the cache; load brings into the cluster what it lacks.
. "$(dirname "$0")/lib.sh"
IMAGES=(operator engine client) # kvern/NAME:e2e
WHEELS=${KVERN_E2E_WHEELS:-$(dirname "$ROOT_DIR")/shared/wheels} # a folder with a CPU build of torch
server_pid=

lend_wheels() {
  rm -f "$RUN/wheels.url"
  python3 "$CLUSTER_DIR/wheels.py" "$WHEELS" "$RUN/wheels.url" &
  server_pid=$!
  local _
  for _ in $(seq 100); do [ ! -s "$RUN/wheels.url" ] || return 0; sleep 0.1; done
  die "the page of wheels did not come up"
}

base_image() {
  local rootfs tag
  rootfs=$("$OFFLINE_DIR/rootfs.sh" --folder python)
  tag=kvern-e2e/base:$(basename "$rootfs")
  if ! docker image inspect "$tag" >/dev/null 2>&1; then
    tar -C "$rootfs" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
      docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$tag" >/dev/null
  fi
  echo "$tag"
}

build() {
  local arguments=(--network=host) name base=
  if [ "$(mode)" = offline ]; then
    export DOCKER_HOST=unix://$RUN/engine-build.sock DOCKER_API_VERSION=1.41 DOCKER_BUILDKIT=0
    base=$(base_image)
    arguments+=(--build-arg "BASE=$base")
  fi
  for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CERT; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
  done
  local engine=("${arguments[@]}" --build-arg VARIANT=cpu)
  if [ -d "$WHEELS" ]; then
    lend_wheels
    engine+=(--build-arg "PIP_FIND_LINKS=$(<"$RUN/wheels.url")")
  fi
  docker build "${arguments[@]}" -t kvern/operator:e2e -f "$ROOT_DIR/operator/Dockerfile" "$ROOT_DIR"
  docker build "${engine[@]}" -t kvern/engine:e2e -f "$ROOT_DIR/engine/Dockerfile" "$ROOT_DIR"
  docker build "${arguments[@]}" -t kvern/client:e2e -f "$ROOT_DIR/e2e/client/Dockerfile" "$ROOT_DIR"
  save
}

# Archives are named after the image's content, so that what did not change is neither saved nor loaded again.
archive() { echo "$CACHE/images/$1-$(docker image inspect -f '{{.Id}}' "kvern/$1:e2e" | cut -c8-19).tar"; }

save() {
  local name file said=
  mkdir -p "$CACHE/images"
  for name in "${IMAGES[@]}"; do
    file=$(archive "$name")
    ln -sfn "$(basename "$file")" "$CACHE/images/$name.tar"
    if [ -f "$file" ]; then said+="$name kept  "; continue; fi
    docker save -o "$file.part" "kvern/$name:e2e"
    find "$CACHE/images" -name "$name-*.tar" -delete
    mv "$file.part" "$file"
    said+="$name $(docker image inspect -f '{{.Size}}' "kvern/$name:e2e" | awk '{ printf "%.0f MB", $1 / 1e6 }')  "
  done
  docker image prune -f --filter until=168h >/dev/null # what no build has used for a week
  note "$said"
}

# What `kind load image-archive` does in a node, but from a file that the node sees: a gigabyte through `docker exec`
# takes twice as long.
import() {
  local node=$1 file
  shift
  for file in "$@"; do
    docker exec --privileged "$node" ctr --namespace=k8s.io images import --all-platforms --digests "$NODE_IMAGES/$(basename "$file")"
  done
}

# What the cluster that is up has been given is remembered beside its kubeconfig.
load() {
  local name file said= node pid pids=() files=()
  for name in "${@:-${IMAGES[@]}}"; do
    file=$(readlink -f "$CACHE/images/$name.tar")
    if grep -qsx "$file" "$RUN/loaded"; then continue; fi
    files+=("$file")
    said+="$name  "
  done
  if [ ${#files[@]} = 0 ]; then
    note "nothing new"
    return
  fi
  for node in $(in_cluster_net kind get nodes --name "$CLUSTER_NAME"); do
    import "$node" "${files[@]}" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  printf '%s\n' "${files[@]}" >>"$RUN/loaded"
  note "$said"
}

trap '[ -z "$server_pid" ] || kill "$server_pid" 2>/dev/null || true' EXIT
case ${1:-} in
  build) build ;;
  load)
    use_cluster_engine
    load "${@:2}" ;;
  *) die "images.sh: '${1:-}'? It knows build and load" ;;
esac
