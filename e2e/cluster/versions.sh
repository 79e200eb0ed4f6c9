# The versions that everything under the cache folder is keyed by. Sourced.
# shellcheck disable=SC2034
KIND_VERSION=v0.33.0
KUBERNETES_VERSION=v1.37.2
KUBERNETES_STAGING_VERSION=v0.37.2 # the same release, as its libraries count
ETCD_VERSION=v3.6.16
ETCD_IMAGE_TAG=3.6.16-0
PAUSE_IMAGE_TAG=3.10.2
CONTAINERD_VERSION=v2.3.4
CRICTL_VERSION=v1.37.0
CNI_VERSION=v1.9.1
COREDNS_VERSION=v1.14.6
LOCAL_PATH_VERSION=v0.0.30
METRICS_SERVER_VERSION=v0.8.0
HELM4_VERSION=v4.3.1
HELM3_VERSION=v3.22.0
KWOK_VERSION=v0.7.0
DEBIAN=bookworm
# What kind's own release notes name for this version of kind.
STOCK_NODE_IMAGE=kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5
# Counted up when a script changes what it makes of the same versions.
NODE_RECIPE=1
