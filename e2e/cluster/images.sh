#!/bin/bash
# images.sh build|load: the images of the project from its Dockerfiles, and a client for the tests, as kvern/*:e2e.
# build leaves them in a Docker engine and in one archive in the cache; load brings the archive into the cluster.
. "$(dirname "$0")/lib.sh"
ARCHIVE=$CACHE/images/kvern.tar
IMAGES=(kvern/operator:e2e kvern/engine:e2e kvern/client:e2e)
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

save() {
  local ids
  ids=$(docker image inspect -f '{{.Id}}' "${IMAGES[@]}")
  if [ -f "$ARCHIVE" ] && [ "$ids" = "$(cat "$ARCHIVE.ids" 2>/dev/null)" ]; then note "kept"; return; fi
  mkdir -p "$CACHE/images"
  docker save -o "$ARCHIVE.part" "${IMAGES[@]}"
  mv "$ARCHIVE.part" "$ARCHIVE"
  echo "$ids" >"$ARCHIVE.ids"
  note "built, $(docker image inspect -f '{{index .RepoTags 0}} {{.Size}}' "${IMAGES[@]}" | awk '{ printf "%s %.0f MB  ", $1, $2 / 1e6 }')"
}

trap '[ -z "$server_pid" ] || kill "$server_pid" 2>/dev/null || true' EXIT
case ${1:-} in
  build) build ;;
  load)
    use_cluster_engine
    in_cluster_net kind load image-archive "$ARCHIVE" --name "$CLUSTER_NAME"
    note "$(du -h "$ARCHIVE" | cut -f1)" ;;
  *) die "images.sh: '${1:-}'? It knows build and load" ;;
esac
