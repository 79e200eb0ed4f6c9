#!/bin/bash
# binaries.sh GROUP...: static programs from their Go modules, each kept as bin/NAME@VERSION and linked into tools/.
# Groups: control (API server, etcd, kubectl, controllers), kubectl, scheduler, kind, helm, helm3, engine, node, metrics,
# kwok. A program that is there already is kept, and what was compiled of another one too.
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

# module NAME KEY PACKAGE@VERSION...: a module of its own whose tools are these packages.
module() {
  local dir=$CACHE/go/modules/$1@$2
  mkdir -p "$dir"
  cd "$dir"
  [ ! -e resolved ] || return 0
  [ -f go.mod ] || go mod init "kvern.invalid/$1"
  if [ "$1" = shared ]; then replace_staging; fi
  go get -tool "${@:3}"
  touch resolved
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

# compile PACKAGE OUTPUT FLAGS TAGS. Two thirds of the usual time: nobody debugs these programs, and the compiler's
# own garbage collector, told that there is memory, takes a quarter of it instead of half.
compile() {
  GOGC=800 GOMEMLIMIT=2GiB go build -p "$JOBS" -trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags "$4" \
    -ldflags "-s -w $3" -o "$2" "$1"
}

# finish NAME VERSION START: the program that was compiled as .NAME.part is one that is kept.
finish() {
  mv "$CACHE/bin/.$1.part" "$CACHE/bin/$1@$2"
  ln -sfn "../bin/$1@$2" "$TOOLS/$1"
  built+=("$1")
  echo "$1 $2: $(seconds_since "$3") s"
}

# one NAME VERSION PACKAGE: a program that shares no versions with the others.
one() {
  local start=$EPOCHREALTIME
  need "$1" "$2" || return 0
  module "$1" "$2" "$3@$2"
  compile "$3" "$CACHE/bin/.$1.part" "" ""
  finish "$1" "$2" "$start"
}

# What is built on Kubernetes' libraries is one module, so that these are compiled once, in one version, and not four
# times in four; but for containerd, which does not compile with those of another release, and metrics-server, which
# compiles and does not start. NAME -> version, package and module.
declare -A version package home
program() { version[$1]=$2 package[$1]=$3 home[$1]=${4:-shared}; }
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl kubeadm; do
  program $name "$KUBERNETES_VERSION" k8s.io/kubernetes/cmd/$name
done
for name in containerd containerd-shim-runc-v2 ctr; do
  program $name "$CONTAINERD_VERSION" github.com/containerd/containerd/v2/cmd/$name containerd
done
for name in ipam/host-local main/loopback main/ptp meta/portmap; do
  program "cni-${name#*/}" "$CNI_VERSION" github.com/containernetworking/plugins/plugins/$name cni
done
program helm4 "$HELM4_VERSION" helm.sh/helm/v4/cmd/helm
program kind "$KIND_VERSION" sigs.k8s.io/kind
program crictl "$CRICTL_VERSION" sigs.k8s.io/cri-tools/cmd/crictl
program coredns "$COREDNS_VERSION" github.com/coredns/coredns
program local-path-provisioner "$LOCAL_PATH_VERSION" github.com/rancher/local-path-provisioner
program metrics-server "$METRICS_SERVER_VERSION" sigs.k8s.io/metrics-server/cmd/metrics-server metrics-server

# What a program says its version is; names that a program has not are of no effect.
version_flags() {
  local v=$KUBERNETES_VERSION minor=${KUBERNETES_VERSION#v1.} c=github.com/containerd/containerd/v2/version
  echo "-X k8s.io/component-base/version.gitVersion=$v -X k8s.io/component-base/version.gitMajor=1" \
    "-X k8s.io/component-base/version.gitMinor=${minor%%.*} -X k8s.io/client-go/pkg/version.gitVersion=$v" \
    "-X $c.Version=$CONTAINERD_VERSION -X $c.Package=${c%/version}" \
    "-X sigs.k8s.io/cri-tools/pkg/version.Version=$CRICTL_VERSION -X main.VERSION=$LOCAL_PATH_VERSION"
}

# together HOME NAME...: programs of one module, those that are not there yet.
together() {
  local name missing=() all=() key start from
  for name in "${@:2}"; do need "$name" "${version[$name]}" && missing+=("$name"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  for name in "${!home[@]}"; do [ "${home[$name]}" != "$1" ] || all+=("${package[$name]}@${version[$name]}"); done
  mapfile -t all < <(printf '%s\n' "${all[@]}" | sort)
  key=$(printf '%s\n' "${all[@]}" "$KUBERNETES_STAGING_VERSION" | sha256sum | cut -c1-12)
  module "$1" "$key" "${all[@]}"
  for name in "${missing[@]}"; do
    start=$EPOCHREALTIME from=${package[$name]}
    if [ "$name" = coredns ]; then # with a main file of our own
      mkdir -p coredns
      cp "$OFFLINE_DIR"/cmd/coredns/main.go coredns/
      from=./coredns
    fi
    compile "$from" "$CACHE/bin/.$name.part" "$(version_flags)" no_aufs,no_zfs,no_btrfs,no_devmapper
    finish "$name" "${version[$name]}" "$start"
  done
}

# ours NAME: a program whose source lies beside this script, keyed by its content.
ours() {
  local source=$OFFLINE_DIR/cmd/$1 key dir start=$EPOCHREALTIME
  key=$(cat "$source"/*.go | sha256sum | cut -c1-12)
  need "$1" "$key" || return 0
  dir=$CACHE/go/modules/$1@$key
  mkdir -p "$dir"
  cp "$source"/*.go "$dir/"
  cd "$dir"
  [ -f go.mod ] || go mod init "kvern.invalid/$1"
  compile . "$CACHE/bin/.$1.part" "" ""
  finish "$1" "$key" "$start"
}

for group in "$@"; do
  case $group in
    control)
      together shared kube-apiserver kubectl kube-controller-manager
      one etcd "$ETCD_VERSION" go.etcd.io/etcd/server/v3 ;;
    kubectl) together shared kubectl ;;
    scheduler) together shared kube-scheduler ;;
    kind) together shared kind ;;
    helm) together shared helm4 ;;
    helm3) one helm3 "$HELM3_VERSION" helm.sh/helm/v3/cmd/helm ;;
    node)
      together shared kube-scheduler kubelet kube-proxy kubeadm crictl coredns local-path-provisioner
      together containerd containerd containerd-shim-runc-v2 ctr
      together cni cni-host-local cni-loopback cni-ptp cni-portmap
      ours pause ;;
    engine) ours runc-wrap ;;
    metrics) together metrics-server metrics-server ;;
    kwok) one kwok "$KWOK_VERSION" sigs.k8s.io/kwok/cmd/kwok ;;
    *) die "binaries.sh: no group '$group'; there are control, kubectl, scheduler, kind, helm, helm3, engine, node, metrics, kwok" ;;
  esac
done
[ -e "$TOOLS/helm" ] || [ ! -e "$TOOLS/helm4" ] || ln -sfn helm4 "$TOOLS/helm"
note "built ${#built[@]}, kept $kept"
