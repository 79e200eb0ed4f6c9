#!/bin/bash
# node.sh: the node image, from Debian's packages (rootfs.sh), kind's own node files and the programs of binaries.sh;
# loaded into the cluster's Docker engine (engine.sh). node.sh --tag prints its name, keyed by what goes into it.
. "$(dirname "$0")/../lib.sh"
V=$KUBERNETES_VERSION

key() {
  { cat "$OFFLINE_DIR"/{node.sh,mkimage.py,cni.sh,cni.yaml} "$OFFLINE_DIR"/cmd/*/*.go "$CLUSTER_DIR/versions.sh"
    "$OFFLINE_DIR/rootfs.sh" --folder node; } | sha256sum | cut -c1-10
}
TAG=kvern-e2e/node:$V-$(key)
if [ "${1:-}" = --tag ]; then echo "$TAG"; exit 0; fi

export DOCKER_HOST=unix://$RUN/engine-cluster.sock DOCKER_API_VERSION=1.41
if docker image inspect "$TAG" >/dev/null 2>&1; then note kept; exit 0; fi

ROOTFS=$("$OFFLINE_DIR/rootfs.sh" --folder node)
WORK=$CACHE/node.part
KIND_SOURCE=$CACHE/go/pkg/sigs.k8s.io/kind@$KIND_VERSION
rm -rf "$WORK"
mkdir -p "$WORK"/{images,manifests}
containerd_pid=
clean() { [ -z "$containerd_pid" ] || kill "$containerd_pid" 2>/dev/null || true; rm -rf "$WORK"; }
trap clean EXIT

# image FILE NAME CONFIG: what lies in $WORK/root becomes an archive for the node's store.
image() { python3 "$OFFLINE_DIR/mkimage.py" "$WORK/images/$1.tar" "$2" "$WORK/root" "$3" --gzip; }

empty_root() { rm -rf "$WORK/root"; mkdir -p "$WORK"/root/{tmp,proc,sys,dev,etc,run}; chmod 1777 "$WORK/root/tmp"; }

# program NAME IMAGE PATH: an image of one static program.
program() {
  empty_root
  install -D -m755 "$(readlink -f "$TOOLS/$1")" "$WORK/root$3"
  install -D -m644 /etc/ssl/certs/ca-certificates.crt "$WORK/root/etc/ssl/certs/ca-certificates.crt"
  echo 'root:x:0:0:root:/:/sbin/nologin' >"$WORK/root/etc/passwd"
  echo 'root:x:0:' >"$WORK/root/etc/group"
  image "$1" "$2" "{\"Entrypoint\": [\"$3\"]}"
}

# from_debian PATH...: programs out of the node's root file system, with the libraries that they load.
from_debian() {
  local root=$WORK/root file library
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64,local/bin}
  for file in bin sbin lib lib64; do [ -e "$root/$file" ] || ln -s "usr/$file" "$root/$file"; done
  for file in "$@"; do
    mkdir -p "$root/$(dirname "$file")"
    if [ -d "$ROOTFS/$file" ]; then cp -a "$ROOTFS/$file" "$root/$(dirname "$file")/"; else cp -L "$ROOTFS/$file" "$root/$file"; fi
  done
  find "$root/usr" -type f \( -perm /111 -o -name '*.so' \) -printf '/usr/%P\n' | while read -r file; do
    [ ! -e "$ROOTFS$file" ] || LC_ALL=C chroot "$ROOTFS" /usr/bin/ldd "$file" 2>/dev/null | grep -o '/[^ ]*\.so[^ ]*' || true
  done | sort -u | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    [ -e "$root$library" ] || cp -L "$ROOTFS$library" "$root$library"
  done
}

control_plane_images() {
  local name
  for name in kube-apiserver kube-controller-manager kube-scheduler; do
    program $name "registry.k8s.io/$name:$V" "/usr/local/bin/$name"
  done
  program etcd "registry.k8s.io/etcd:$ETCD_IMAGE_TAG" /usr/local/bin/etcd
  program coredns "registry.k8s.io/coredns/coredns:$COREDNS_VERSION" /coredns
  program pause "registry.k8s.io/pause:$PAUSE_IMAGE_TAG" /pause
}

# kube-proxy and the pod network need iptables, nft and a few tools beside their program.
network_images() {
  local name
  empty_root
  from_debian usr/sbin/xtables-nft-multi usr/sbin/xtables-legacy-multi usr/sbin/nft usr/sbin/conntrack usr/bin/bash \
    usr/bin/dash usr/bin/jq usr/bin/sleep usr/bin/cat usr/bin/mv usr/bin/mkdir usr/bin/grep usr/bin/sed bin/ip \
    usr/lib/x86_64-linux-gnu/xtables
  ln -s dash "$WORK/root/usr/bin/sh"
  mkdir -p "$WORK/root/var"
  ln -s /run "$WORK/root/var/run"
  echo 'root:x:0:0:root:/root:/bin/bash' >"$WORK/root/etc/passwd"
  echo 'root:x:0:' >"$WORK/root/etc/group"
  cp "$ROOTFS"/etc/{protocols,services,ethertypes} "$WORK/root/etc/" 2>/dev/null || true
  for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do
    ln -s xtables-nft-multi "$WORK/root/usr/sbin/$name"
    ln -s xtables-nft-multi "$WORK/root/usr/sbin/${name/tables/tables-nft}"
    ln -s xtables-legacy-multi "$WORK/root/usr/sbin/${name/tables/tables-legacy}"
  done
  chroot "$WORK/root" /usr/sbin/iptables --version
  chroot "$WORK/root" /usr/sbin/nft --version
  chroot "$WORK/root" /usr/sbin/conntrack --version
  chroot "$WORK/root" /usr/bin/jq --version
  install -m755 "$(readlink -f "$TOOLS/kube-proxy")" "$WORK/root/usr/local/bin/kube-proxy"
  image kube-proxy "registry.k8s.io/kube-proxy:$V" '{"Entrypoint": ["/usr/local/bin/kube-proxy"]}'
  rm "$WORK/root/usr/local/bin/kube-proxy"
  install -m755 "$(readlink -f "$TOOLS/kubectl")" "$WORK/root/usr/local/bin/kubectl"
  install -m755 "$OFFLINE_DIR/cni.sh" "$WORK/root/usr/local/bin/cni"
  image cni docker.io/kvern-e2e/cni:v1 '{"Entrypoint": ["/usr/local/bin/cni"]}'
}

# kind's default storage, under the names that its own manifest uses; the manifest stands in kind's source.
storage_images() {
  local provisioner helper
  python3 "$OFFLINE_DIR/storage_manifest.py" "$KIND_SOURCE/pkg/build/nodeimage/const_storage.go" \
    >"$WORK/manifests/default-storage.yaml"
  provisioner=$(grep -o 'docker.io/kindest/local-path-provisioner:[^ "]*' "$WORK/manifests/default-storage.yaml" | head -n 1)
  helper=$(grep -o 'docker.io/kindest/local-path-helper:[^ "]*' "$WORK/manifests/default-storage.yaml" | head -n 1)
  program local-path-provisioner "$provisioner" /usr/local/bin/local-path-provisioner
  empty_root
  from_debian usr/bin/dash usr/bin/mkdir usr/bin/rm usr/bin/chmod
  ln -s dash "$WORK/root/usr/bin/sh"
  image local-path-helper "$helper" '{"Cmd": ["/bin/sh"]}'
}

# The steps of kind's own images/base, on Debian's root.
node_root() {
  local node=$WORK/node files=$KIND_SOURCE/images/base/files
  cp -a "$ROOTFS" "$node"
  cp -r --no-preserve=mode,ownership "$files"/{usr,kind,etc} "$node/"
  chmod 755 "$node"/usr/local/bin/* "$node/kind" "$node/kind/bin" "$node"/kind/bin/*
  find "$node/lib/systemd/system/sysinit.target.wants/" -name systemd-tmpfiles-setup.service -delete
  rm -f "$node"/lib/systemd/system/multi-user.target.wants/* "$node"/etc/systemd/system/*.wants/* \
    "$node"/lib/systemd/system/local-fs.target.wants/* "$node"/lib/systemd/system/sockets.target.wants/*udev* \
    "$node"/lib/systemd/system/sockets.target.wants/*initctl* "$node"/lib/systemd/system/basic.target.wants/*
  echo ReadKMsg=no >>"$node/etc/systemd/journald.conf"
  ln -sf /usr/lib/systemd/systemd "$node/sbin/init"
  chroot "$node" systemctl enable kubelet.service containerd.service undo-mount-hacks.service
  chroot "$node" systemctl mask systemd-binfmt.service
  mkdir -p "$node/etc/kubernetes/manifests" "$node/opt/cni/bin" "$node/etc/cni/net.d" "$node/kind/manifests"
  local name
  for name in containerd containerd-shim-runc-v2 ctr crictl; do
    install -m755 "$(readlink -f "$TOOLS/$name")" "$node/usr/local/bin/$name"
  done
  for name in host-local loopback ptp portmap; do
    install -m755 "$(readlink -f "$TOOLS/cni-$name")" "$node/opt/cni/bin/$name"
  done
  for name in kubelet kubectl kubeadm; do install -m755 "$(readlink -f "$TOOLS/$name")" "$node/usr/bin/$name"; done
  printf %s "$V" >"$node/kind/version"
  cp "$WORK"/manifests/*.yaml "$node/kind/manifests/"
  cp "$OFFLINE_DIR/cni.yaml" "$node/kind/manifests/default-cni.yaml"
  "$TOOLS/ctr" oci spec |
    chroot "$node" jq '.hooks.createContainer[.hooks.createContainer | length] |= . + {path: "/kind/bin/mount-product-files.sh"}
      | del(.process.rlimits)' >"$node/etc/containerd/cri-base.json"
  # A machine may not let a container's OOM score be lowered below its own.
  sed -i "s#restrict_oom_score_adj = false#restrict_oom_score_adj = true#; s#pause:3.10\"#pause:$PAUSE_IMAGE_TAG\"#" \
    "$node/etc/containerd/config.toml"
  python3 "$OFFLINE_DIR/hide_controllers.py" "$node/usr/local/bin/entrypoint"
}

# Into the node's content store, not unpacked, as kind does: a containerd for the moment, on that store.
preload() {
  local state=$WORK/containerd file _
  mkdir -p "$state"
  cat >"$state/config.toml" <<T
version = 3
root = "$WORK/node/var/lib/containerd"
state = "$state/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
address = "$state/socket"
[plugins."io.containerd.internal.v1.opt"]
path = "$state/opt"
T
  "$TOOLS/containerd" -c "$state/config.toml" >"$state/log" 2>&1 </dev/null &
  containerd_pid=$!
  for _ in $(seq 100); do [ ! -S "$state/socket" ] || break; sleep 0.1; done
  [ -S "$state/socket" ] || { tail -n 5 "$state/log" >&2; die "containerd did not start"; }
  for file in "$WORK"/images/*.tar; do
    "$TOOLS/ctr" -a "$state/socket" -n k8s.io images import --label=io.cri-containerd.pinned=pinned --all-platforms \
      --no-unpack "$file" >/dev/null
  done
  "$TOOLS/ctr" -a "$state/socket" -n k8s.io images ls -q | grep -v @sha256
  kill "$containerd_pid"
  wait "$containerd_pid" 2>/dev/null || true
  containerd_pid=
}

control_plane_images
network_images
storage_images
node_root
preload
rm -rf "$WORK/root" "$WORK/images"
python3 "$OFFLINE_DIR/mkimage.py" "$WORK/node.tar" "$TAG" "$WORK/node" '{
  "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "container=docker"],
  "StopSignal": "SIGRTMIN+3", "Entrypoint": ["/usr/local/bin/entrypoint", "/sbin/init"]}'
docker load -i "$WORK/node.tar"
for old in $(docker image ls -q --filter 'reference=kvern-e2e/node' --filter "before=$TAG"); do
  docker image rm -f "$old" >/dev/null 2>&1 || true # of earlier versions
done
note "built, $(docker image inspect -f '{{.Size}}' "$TAG" | awk '{ printf "%.0f MB", $1 / 1e6 }')"
