#!/bin/bash
# The cluster's pod network, for a few IPv4 nodes: what kind's own agent does, whose source cannot be had as a module.
# Writes the CNI configuration (ptp, host-local, portmap) of this node's pod range, keeps a route to every other node's
# range, masquerades what leaves the pod network. It enforces no NetworkPolicy. Environment: NODE_NAME, POD_SUBNET.
account=/var/run/secrets/kubernetes.io/serviceaccount

# Everything is said explicitly: with any override kubectl no longer finds the in-cluster configuration by itself.
nodes() {
  kubectl --server="https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT" --certificate-authority=$account/ca.crt \
    --token="$(<$account/token)" --request-timeout=5s get --raw /api/v1/nodes
}

configuration() {
  jq -n --arg range "$1" '{cniVersion: "0.4.0", name: "kvern-e2e", plugins: [
    {type: "ptp", ipMasq: false, mtu: 1500, ipam: {type: "host-local", dataDir: "/run/cni-ipam-state",
      routes: [{dst: "0.0.0.0/0"}], ranges: [[{subnet: $range}]]}},
    {type: "portmap", capabilities: {portMappings: true}}]}'
}

masquerade() { iptables -w -t nat "$1" POSTROUTING -s "$POD_SUBNET" ! -d "$POD_SUBNET" -m addrtype ! --dst-type LOCAL -j MASQUERADE; }

written=
while :; do
  if ! list=$(nodes); then sleep 1; continue; fi
  range=$(jq -r --arg name "$NODE_NAME" '.items[] | select(.metadata.name == $name) | .spec.podCIDR // ""' <<<"$list")
  if [ -n "$range" ] && [ "$range" != "$written" ]; then
    configuration "$range" >/etc/cni/net.d/.part && mv /etc/cni/net.d/.part /etc/cni/net.d/10-kvern-e2e.conflist
    written=$range
    echo "pods of this node: $range"
  fi
  jq -r --arg name "$NODE_NAME" '.items[] | select(.metadata.name != $name and .spec.podCIDR != null)
    | .spec.podCIDR + " " + (.status.addresses[] | select(.type == "InternalIP").address)' <<<"$list" |
    while read -r other via; do ip route replace "$other" via "$via"; done
  masquerade -C 2>/dev/null || masquerade -A
  if [ -n "$written" ]; then sleep 10; else sleep 1; fi
done
