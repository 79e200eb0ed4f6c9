#!/bin/bash
# run.sh [PYTEST ARGUMENTS]: make e2e. A cluster, the images, the tests, and all of it taken away again; at the end the
# time of each stage. KVERN_E2E_KEEP=1 leaves the cluster as it is.
. "$(dirname "$0")/lib.sh"
PYTHON=${KVERN_E2E_PYTHON:-$ROOT_DIR/.venv/bin/python}
start=$EPOCHREALTIME status=0

finish() {
  status=$?
  trap - EXIT INT TERM
  if [ -z "${KVERN_E2E_KEEP:-}" ]; then "$CLUSTER_DIR/cluster.sh" down || status=1; else echo "==> the cluster is kept: make cluster-down"; fi
  echo "==> times"
  stage_table
  echo "==> $([ $status = 0 ] && echo passed || echo FAILED) after $(seconds_since "$start") s"
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

"$CLUSTER_DIR/cluster.sh" up
cd "$ROOT_DIR"
echo "==> tests"
tests=$EPOCHREALTIME
"$CLUSTER_DIR/cluster.sh" exec "$PYTHON" -m pytest -c e2e/pytest.ini e2e "$@" || status=$?
printf 'tests\t%s\t%s\n' "$(seconds_since "$tests")" "$([ $status = 0 ] && echo passed || echo "FAILED (exit $status)")" >>"$RUN/stages.tsv"
[ $status = 0 ] || "$CLUSTER_DIR/cluster.sh" diagnose || true
exit $status
