#!/bin/bash
# rootfs.sh node|python: a Debian root file system in the cache, from packages (half a minute to two and a half).
# node: what kind's node image is built on. python: what the images of the project are built on (BASE of the
# Dockerfiles) where python:3.12-slim cannot be pulled.
. "$(dirname "$0")/../lib.sh"

packages() {
  case $1 in
    node) echo systemd,conntrack,iptables,nftables,iproute2,ethtool,util-linux,mount,kmod,libseccomp2,pigz,socat,bash,ca-certificates,curl,jq,procps,runc,ebtables ;;
    python) echo python3,python3-venv,python3-pip,ca-certificates,curl ;; # curl: what the tutorial asks with
    *) die "rootfs.sh: no root file system '$1'; there are node and python" ;;
  esac
}

# The folder of a root file system, keyed by what is in it.
folder() { echo "$CACHE/rootfs/$1-$DEBIAN-$(packages "$1" | sha256sum | cut -c1-8)"; }

case $1 in
  --folder) folder "$2" ;;
  *)
    target=$(folder "$1")
    if [ -d "$target" ]; then note kept; exit 0; fi
    command -v debootstrap >/dev/null || "$OFFLINE_DIR/packages.sh" debootstrap
    rm -rf "$target.part"
    mkdir -p "$CACHE/rootfs"
    debootstrap --variant=minbase --include="$(packages "$1")" "$DEBIAN" "$target.part" ${KVERN_E2E_MIRROR:-}
    rm -rf "$target".part/var/cache/apt/* "$target".part/var/lib/apt/lists/* "$target".part/usr/share/{doc,man,locale}/*
    if [ "$1" = python ]; then # images built on it trust whom this machine trusts (a proxy's certificate, say)
      cp -L /etc/ssl/certs/ca-certificates.crt "$target.part/etc/ssl/certs/ca-certificates.crt"
    fi
    mv "$target.part" "$target"
    note built ;;
esac
