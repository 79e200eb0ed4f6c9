#!/bin/bash
# node.sh NODE COMMAND...: runs a command on a node of the cluster that is up, as root, with this shell's stdin.
# node.sh --kill NODE ends a node as a power cut does, node.sh --start NODE brings it back. For the tests of failures.
. "$(dirname "$0")/lib.sh"
use_cluster_engine
case ${1:-} in
  --kill) docker kill "$2" >/dev/null ;;
  --start) docker start "$2" >/dev/null ;;
  "") die "node.sh NODE COMMAND..." ;;
  *) exec docker exec -i "$@" ;;
esac
