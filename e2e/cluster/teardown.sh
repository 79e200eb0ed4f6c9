#!/bin/bash
# teardown.sh: deletes the cluster and stops what cluster.sh started. Files in the cache stay.
. "$(dirname "$0")/lib.sh"
use_cluster_engine
if [ "$(mode)" = offline ]; then
  # After a crash there may be containers of a cluster, but no engine to delete them with.
  if [ -d "$CACHE/engine/cluster" ] && [ -x "$TOOLS/kind" ]; then
    "$OFFLINE_DIR/engine.sh" start cluster
    in_cluster_net kind delete cluster --name "$CLUSTER_NAME" --kubeconfig "$KUBECONFIG" || true
    docker container prune -f >/dev/null || true
    docker volume prune -f >/dev/null || true
    docker network rm kind >/dev/null 2>&1 || true
  fi
  "$OFFLINE_DIR/engine.sh" stop cluster
  "$OFFLINE_DIR/engine.sh" stop build
else
  kind delete cluster --name "$CLUSTER_NAME" --kubeconfig "$KUBECONFIG"
fi
rm -f "$KUBECONFIG" "$RUN/kind.yaml"
