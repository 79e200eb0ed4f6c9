#!/bin/bash
# engine.sh start|stop cluster|build: a Docker engine of the tests' own, with Debian's docker.io and runc.
# cluster: inside the network namespace, with bridge and rules of its own, for kind's nodes; nothing reaches the
# machine's network. build: on the machine's network, without any bridge, for `docker build --network=host`.
. "$(dirname "$0")/../lib.sh"
action=$1 name=$2
SOCKET=$RUN/engine-$name.sock PIDFILE=$RUN/engine-$name.pid EXEC_ROOT=/run/kvern-e2e-$name
export DOCKER_HOST=unix://$SOCKET DOCKER_API_VERSION=1.41
PATH=${PATH#"$TOOLS:"} # Debian's engine wants Debian's containerd and shim, not those made for the node

alive() { [ -s "$PIDFILE" ] && [ "$(cat "/proc/$(<"$PIDFILE")/comm" 2>/dev/null)" = dockerd ]; }

start() {
  [ "$(id -u)" = 0 ] || die "must be root to start a Docker engine"
  command -v dockerd >/dev/null && command -v runc >/dev/null && command -v iptables >/dev/null &&
    command -v ip >/dev/null || "$OFFLINE_DIR/packages.sh" docker.io runc iptables iproute2
  if alive && docker info >/dev/null 2>&1; then note "was running"; return; fi
  rm -f "$PIDFILE" "$SOCKET"
  mkdir -p "$CACHE/engine/$name" "$EXEC_ROOT"
  echo '{}' >"$RUN/engine.json" # whatever /etc/docker says is not meant for this engine
  local enter=() network=(--bridge=none --iptables=false)
  if [ "$name" = cluster ]; then
    [ -e "/run/netns/$NETNS" ] || ip netns add "$NETNS"
    nsenter --net="/run/netns/$NETNS" ip link set lo up
    # Not `ip netns exec`: it hides the cgroups.
    enter=(nsenter "--net=/run/netns/$NETNS")
    network=(--bip 10.251.1.1/24 --default-address-pool base=10.251.16.0/20,size=24)
  fi
  setsid "${enter[@]}" dockerd --config-file "$RUN/engine.json" --data-root "$CACHE/engine/$name" \
    --exec-root "$EXEC_ROOT" --pidfile "$PIDFILE" -H "$DOCKER_HOST" --storage-driver overlay2 --oom-score-adjust 0 \
    --cgroup-parent "/$NETNS" --default-runtime wrapped --add-runtime "wrapped=$(readlink -f "$TOOLS/runc-wrap")" \
    "${network[@]}" >"$LOGS/engine-$name.log" 2>&1 </dev/null &
  local _
  for _ in $(seq 120); do
    if docker info >/dev/null 2>&1; then return; fi
    sleep 0.25
  done
  tail -n 10 "$LOGS/engine-$name.log" >&2
  die "the Docker engine did not start within 30 s"
}

stop() {
  if alive; then
    local pid
    pid=$(<"$PIDFILE")
    kill "$pid"
    for _ in $(seq 150); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
    [ ! -d "/proc/$pid" ] || kill -9 "$pid"
  fi
  rm -f "$PIDFILE" "$SOCKET"
  local mounted
  for mounted in "$EXEC_ROOT"/netns/*; do [ ! -e "$mounted" ] || umount "$mounted" 2>/dev/null || true; done
  rm -rf "$EXEC_ROOT"
  if [ "$name" = cluster ]; then
    [ ! -e "/run/netns/$NETNS" ] || ip netns del "$NETNS"
    rmdir /lib/modules 2>/dev/null || true # made by Docker for kind's mount of it where the machine had none
  fi
  # Not beside a cluster that is up: its kubelets have empty groups, too.
  if [ -e "$RUN/engine-cluster.pid" ]; then return; fi
  local group
  for group in /sys/fs/cgroup/*/"$NETNS" /sys/fs/cgroup/"$NETNS"; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
}

case $action in
  start) start ;;
  stop) stop ;;
  *) die "engine.sh: '$action'? It knows start and stop" ;;
esac
