#!/bin/bash
# run.sh [PYTEST ARGUMENTS]: make e2e. A cluster, the images, the tests, and all of it taken away again; at the end the
# time of each stage. KVERN_E2E_KEEP=1 leaves the cluster as it is, with every service that the tests have made: for a few
# of them, since those of all are more than two cores carry. KVERN_E2E_FULL=1: make e2e-full, with the tests that take
# long, and then, without a cluster, the operator's tests against an API server of their own and the scale figures.
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

# The largest image is loaded while the first tests run, which need none of it.
"$CLUSTER_DIR/cluster.sh" up $([ $# -gt 0 ] || echo --no-engine)
cd "$ROOT_DIR"

# tests NAME ARGUMENTS...: one run of pytest, in the table of times; returns its status. No test in it (-k, -m) is none.
# What failed, at most three tests, runs once more with nothing of its group beside it.
tests() {
  local name=$1 begin=$EPOCHREALTIME code=0
  shift
  echo "==> $name"
  local run=("$CLUSTER_DIR/cluster.sh" exec "$PYTHON" -m pytest -c e2e/pytest.ini -o "cache_dir=$RUN/pytest/${name// /-}" "$@")
  "${run[@]}" || code=$?
  [ $code != 1 ] || { code=0 && "$ROOT_DIR/tools/again.sh" 3 "${run[@]}" || code=$?; }
  [ $code != 5 ] || code=0
  printf '%s\t%s\t%s\n' "$name" "$(seconds_since "$begin")" "$([ $code = 0 ] || echo "FAILED (exit $code)")" >>"$RUN/stages.tsv"
  return $code
}

if [ $# -gt 0 ]; then
  tests "tests" e2e "$@" || status=$?
else
  # What the others stand on comes first, by itself; most of the rest spend their time waiting, so that two go on at a
  # time, and events under load and the autoscaler beside them, whose engines take next to no processor; those that take
  # the operator away or count its writes are alone at the end.
  "$CLUSTER_DIR/cluster.sh" load &
  loading=$!
  tests "tests of cluster and API server" e2e/test_0_*.py e2e/test_7_*.py || status=$?
  wait "$loading"
  tests "tests of first use" e2e/test_1_*.py || status=$?
  tests "events under load" -m "not alone" e2e/test_8_events.py >"$LOGS/events-under-load.log" 2>&1 &
  events=$!
  tests "autoscaling" -m "not alone" e2e/test_8_autoscale.py e2e/test_8_sharing.py >"$LOGS/autoscaling.log" 2>&1 &
  scaling=$!
  tests "tests side by side" -n 2 -m "not alone" e2e/test_[2-6]_*.py e2e/test_9_*.py || status=$?
  wait "$events" || status=$?
  wait "$scaling" || status=$?
  cat "$LOGS/events-under-load.log" "$LOGS/autoscaling.log"
  tests "tests of the operator alone" -m alone e2e/test_[2-9]_*.py || status=$?
fi
[ $status = 0 ] || "$CLUSTER_DIR/cluster.sh" diagnose || true

# scale: how far one operator goes (e2e/README.md, "Scale"), with the machine to itself; a JSON line a phase.
scale() {
  local code=0
  [ -n "${KVERN_E2E_KEEP:-}" ] || "$CLUSTER_DIR/cluster.sh" down
  stage "programs of the scale figures" "$OFFLINE_DIR/binaries.sh" control scheduler kwok || return
  stage "operator against an API server" env KVERN_TEST_FULL=1 "$PYTHON" -m pytest -q tests/operator/test_control_plane.py || code=$?
  stage "scale figures" "$PYTHON" "$ROOT_DIR/e2e/scale/run.py" --out "$LOGS/scale.jsonl" || code=$?
  grep '^{' "$LOGS/scale-figures.log" || true
  return $code
}
if [ $# = 0 ] && [ -n "${KVERN_E2E_FULL:-}" ]; then scale || status=$?; fi
exit $status
