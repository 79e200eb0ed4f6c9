#!/bin/bash
# kind.sh NODE_IMAGE|stock: creates the kind cluster of the tests, one control plane and one worker, both for workloads,
# each with eight fake GPUs. The API server keeps an audit log of every write (see audit.yaml).
. "$(dirname "$0")/lib.sh"
use_cluster_engine
image=$1
GPUS=${KVERN_E2E_FAKE_GPUS:-8}

configuration() {
  cat <<Y
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: $CLUSTER_NAME
networking:
  apiServerAddress: 127.0.0.1
kubeadmConfigPatches:
- |
  kind: ClusterConfiguration
  apiServer:
    extraArgs:
    - {name: audit-policy-file, value: /etc/kubernetes/audit.yaml}
    - {name: audit-log-path, value: /var/log/kubernetes/audit.log}
    - {name: audit-log-maxsize, value: "50"}
    extraVolumes:
    - {name: audit-policy, hostPath: /etc/kubernetes/audit.yaml, mountPath: /etc/kubernetes/audit.yaml, readOnly: true, pathType: File}
    - {name: audit-log, hostPath: /var/log/kubernetes, mountPath: /var/log/kubernetes, readOnly: false, pathType: DirectoryOrCreate}
  controllerManager:
    extraArgs:
    # An HPA looks twice as often as by default, so that a test of it is over in two minutes.
    - {name: horizontal-pod-autoscaler-sync-period, value: 5s}
Y
  if [ "$image" != stock ]; then
    cat <<Y
  etcd:
    local: {imageTag: $ETCD_IMAGE_TAG}
- |
  kind: KubeletConfiguration
  failCgroupV1: false
  oomScoreAdj: 0
- |
  kind: KubeProxyConfiguration
  oomScoreAdj: 0
Y
  fi
  echo "nodes:"
  local role
  for role in control-plane worker; do
    echo "- role: $role"
    if [ "$image" = stock ]; then echo "  image: $STOCK_NODE_IMAGE"; else echo "  image: $image"; fi
    echo "  extraMounts:"
    echo "  - {hostPath: $CACHE/images, containerPath: $NODE_IMAGES, readOnly: true}"
    if [ $role = control-plane ]; then
      echo "  - {hostPath: $CLUSTER_DIR/audit.yaml, containerPath: /etc/kubernetes/audit.yaml, readOnly: true}"
    fi
  done
}

mkdir -p "$CACHE/images"
configuration >"$RUN/kind.yaml"
rm -f "$RUN/loaded"
in_cluster_net kind create cluster --config "$RUN/kind.yaml" --kubeconfig "$KUBECONFIG" --wait 180s
for _ in $(seq 100); do
  [ "$(in_cluster_net kubectl get nodes -o name | wc -l)" = 2 ] && break
  sleep 0.2
done
in_cluster_net kubectl taint nodes --all node-role.kubernetes.io/control-plane- || true
for node in $(in_cluster_net kubectl get nodes -o jsonpath='{.items[*].metadata.name}'); do
  in_cluster_net kubectl patch node "$node" --subresource=status --type=json -p "[
    {\"op\": \"add\", \"path\": \"/status/capacity/nvidia.com~1gpu\", \"value\": \"$GPUS\"},
    {\"op\": \"add\", \"path\": \"/status/allocatable/nvidia.com~1gpu\", \"value\": \"$GPUS\"}]"
done
in_cluster_net kubectl wait --for=condition=Ready nodes --all --timeout=120s
note "Kubernetes $(in_cluster_net kubectl version -o json | sed -n 's/.*"gitVersion": "\(.*\)".*/\1/p' | tail -n 1), 2 nodes"
