#!/bin/bash
# diagnose.sh: what one wants to know when a test has failed; inside the cluster's network. Prints, changes nothing.
. "$(dirname "$0")/lib.sh"
set +e
section() { printf '\n---- %s\n' "$1"; shift; timeout 20 "$@" 2>&1 | tail -n "${LINES_MAX:-60}"; }
section "nodes" kubectl get nodes -o wide
section "pods that are not well" sh -c "kubectl get pods -A -o wide | grep -v -E ' (Running|Completed) .* 0 ' "
section "inference services" kubectl get inferenceservices -A
section "their conditions" kubectl get inferenceservices -A -o \
  jsonpath='{range .items[*]}{.metadata.namespace}/{.metadata.name}{"\n"}{range .status.conditions[*]}{"  "}{.type}={.status} {.reason}: {.message}{"\n"}{end}{end}'
section "events, latest last" kubectl get events -A --sort-by=.metadata.creationTimestamp
section "operator" kubectl -n kvern-system logs deployment/kvern-operator --all-containers --tail=60
for pod in $(kubectl get pods -A -l app.kubernetes.io/managed-by=kvern -o jsonpath='{range .items[*]}{.metadata.namespace}/{.metadata.name} {end}' 2>/dev/null); do
  LINES_MAX=25 section "log of $pod" kubectl -n "${pod%/*}" logs "${pod#*/}" --all-containers --prefix --tail=25
done
exit 0
