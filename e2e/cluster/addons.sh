#!/bin/bash
# addons.sh: metrics-server (for HPAs), from its Go module, in the cluster that is up.
. "$(dirname "$0")/lib.sh"
use_cluster_engine
archive=$CACHE/images/metrics-server-$METRICS_SERVER_VERSION.tar
if [ ! -f "$archive" ]; then
  mkdir -p "$CACHE/images"
  root=$(mktemp -d "$CACHE/images/.root-XXXXXX")
  trap 'rm -rf "$root"' EXIT
  install -D -m755 "$(readlink -f "$TOOLS/metrics-server")" "$root/metrics-server"
  mkdir -m 1777 "$root/tmp"
  python3 "$OFFLINE_DIR/mkimage.py" "$archive" "kvern-e2e/metrics-server:$METRICS_SERVER_VERSION" "$root" \
    '{"Entrypoint": ["/metrics-server"], "User": "65532:65532"}' --gzip
fi
in_cluster_net kind load image-archive "$archive" --name "$CLUSTER_NAME"
sed "s/@VERSION@/$METRICS_SERVER_VERSION/" "$CLUSTER_DIR/metrics-server.yaml" |
  in_cluster_net kubectl apply --server-side -f -
