#!/bin/bash
# binaries.sh GROUP...: static programs from their Go modules, each kept as bin/NAME@VERSION and linked into tools/.
# Groups: control (API server, etcd, kubectl, controllers), scheduler, kind, helm, engine, node, metrics, kwok.
# A program that is there already is kept, so an interrupted run goes on where it was. Everything cold: about 20 minutes
# on two cores.
. "$(dirname "$0")/../lib.sh"
export CGO_ENABLED=0 GOCACHE=$CACHE/go/build GOMODCACHE=$CACHE/go/pkg GOTOOLCHAIN=local GOWORK=off
JOBS=${KVERN_E2E_GO_JOBS:-2}
built=() kept=0

# Where Go's own installer puts it, which a shell without a profile does not look into.
command -v go >/dev/null || PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is not on PATH: these programs are built from their Go modules; install Go 1.26"
go version | grep -Eq 'go1\.(2[6-9]|[3-9][0-9])' || die "Kubernetes $KUBERNETES_VERSION needs Go 1.26, this is $(go version)"

# need NAME VERSION: is it still to be built? Links it where not.
need() {
  if [ -x "$CACHE/bin/$1@$2" ]; then
    ln -sfn "../bin/$1@$2" "$TOOLS/$1"
    kept=$((kept + 1))
    return 1
  fi
}

# module NAME VERSION PACKAGE...: a module of its own whose tools are these packages.
module() {
  local dir=$CACHE/go/modules/$1@$2
  mkdir -p "$dir"
  cd "$dir"
  [ -f go.mod ] || go mod init "kvern.invalid/$1"
  if [ "$1" = kubernetes ]; then replace_staging; fi
  go get -tool "${@:3}"
}

# Kubernetes' own go.mod names its libraries at v0.0.0, next door; a module outside must say where they are.
replace_staging() {
  local name
  for name in api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap \
    code-generator component-base component-helpers controller-manager cri-api cri-client cri-streaming \
    csi-translation-lib dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator \
    kube-controller-manager kube-proxy kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission \
    sample-apiserver sample-cli-plugin sample-controller streaming; do
    go mod edit -replace "k8s.io/$name=k8s.io/$name@$KUBERNETES_STAGING_VERSION"
  done
}

# build NAME VERSION PACKAGE [LDFLAGS [TAGS]], in the module's folder.
build() {
  local start=$EPOCHREALTIME part=$CACHE/bin/.$1.part
  go build -p "$JOBS" -trimpath -buildvcs=false -tags "${5:-}" -ldflags "-s -w ${4:-}" -o "$part" "$3"
  mv "$part" "$CACHE/bin/$1@$2"
  ln -sfn "../bin/$1@$2" "$TOOLS/$1"
  built+=("$1")
  echo "$1 $2: $(seconds_since "$start") s"
}

# one NAME VERSION PACKAGE [LDFLAGS [TAGS]]
one() {
  need "$1" "$2" || return 0
  module "$1" "$2" "$3@$2"
  build "$@"
}

kubernetes() {
  local v=$KUBERNETES_VERSION all=() name missing=()
  for name in "$@"; do need "$name" "$v" && missing+=("$name"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl kubeadm; do
    all+=("k8s.io/kubernetes/cmd/$name@$v")
  done
  module kubernetes "$v" "${all[@]}"
  local minor=${v#v1.}
  local flags="-X k8s.io/component-base/version.gitVersion=$v -X k8s.io/component-base/version.gitMajor=1"
  flags+=" -X k8s.io/component-base/version.gitMinor=${minor%%.*} -X k8s.io/client-go/pkg/version.gitVersion=$v"
  for name in "${missing[@]}"; do build "$name" "$v" "k8s.io/kubernetes/cmd/$name" "$flags"; done
}

containerd() {
  local c=github.com/containerd/containerd/v2 v=$CONTAINERD_VERSION name missing=() all=()
  for name in containerd-shim-runc-v2 ctr containerd; do
    all+=("$c/cmd/$name@$v")
    need "$name" "$v" && missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  module containerd "$v" "${all[@]}"
  for name in "${missing[@]}"; do
    build "$name" "$v" "$c/cmd/$name" "-X $c/version.Version=$v -X $c/version.Package=$c" \
      "no_aufs no_zfs no_btrfs no_devmapper"
  done
}

cni() {
  local p=github.com/containernetworking/plugins/plugins v=$CNI_VERSION name missing=() all=()
  for name in ipam/host-local main/loopback main/ptp meta/portmap; do
    all+=("$p/$name@$v")
    need "cni-${name#*/}" "$v" && missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  module cni "$v" "${all[@]}"
  for name in "${missing[@]}"; do build "cni-${name#*/}" "$v" "$p/$name"; done
}

# ours NAME: a program whose source lies beside this script, keyed by its content.
ours() {
  local source=$OFFLINE_DIR/cmd/$1 version dir
  version=$(cat "$source"/*.go | sha256sum | cut -c1-12)
  need "$1" "$version" || return 0
  dir=$CACHE/go/modules/$1@$version
  mkdir -p "$dir"
  cp "$source"/*.go "$dir/"
  cd "$dir"
  [ -f go.mod ] || go mod init "kvern.invalid/$1"
  build "$1" "$version" .
}

for group in "$@"; do
  case $group in
    control)
      kubernetes kube-apiserver
      one etcd "$ETCD_VERSION" go.etcd.io/etcd/server/v3
      kubernetes kubectl kube-controller-manager ;;
    kubectl) kubernetes kubectl ;;
    scheduler) kubernetes kube-scheduler ;;
    kind) one kind "$KIND_VERSION" sigs.k8s.io/kind ;;
    helm)
      one helm4 "$HELM4_VERSION" helm.sh/helm/v4/cmd/helm
      one helm3 "$HELM3_VERSION" helm.sh/helm/v3/cmd/helm ;;
    node)
      kubernetes kube-scheduler kubelet kube-proxy kubeadm
      containerd
      cni
      one crictl "$CRICTL_VERSION" sigs.k8s.io/cri-tools/cmd/crictl \
        "-X sigs.k8s.io/cri-tools/pkg/version.Version=$CRICTL_VERSION"
      one coredns "$COREDNS_VERSION" github.com/coredns/coredns
      one local-path-provisioner "$LOCAL_PATH_VERSION" github.com/rancher/local-path-provisioner \
        "-X main.VERSION=$LOCAL_PATH_VERSION"
      ours pause ;;
    engine) ours runc-wrap ;;
    metrics) one metrics-server "$METRICS_SERVER_VERSION" sigs.k8s.io/metrics-server/cmd/metrics-server ;;
    kwok) one kwok "$KWOK_VERSION" sigs.k8s.io/kwok/cmd/kwok ;;
    *) die "binaries.sh: no group '$group'; there are control, kubectl, scheduler, kind, helm, engine, node, metrics, kwok" ;;
  esac
done
[ -e "$TOOLS/helm" ] || [ ! -e "$TOOLS/helm4" ] || ln -sfn helm4 "$TOOLS/helm"
note "built ${#built[@]}, kept $kept"
