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

# The largest image is loaded while the first tests run, which need none of it.
"$CLUSTER_DIR/cluster.sh" up $([ $# -gt 0 ] || echo --no-engine)
cd "$ROOT_DIR"

# again PYTEST...: what failed, at most three tests, once more with nothing of its group beside it. One that passes now was
# disturbed by the machine, and is named; one that fails again fails the run.
again() {
  local failed
  failed=$("$@" -n 0 --last-failed --last-failed-no-failures none --collect-only -q 2>/dev/null | grep -c :: || true)
  if ((failed == 0 || failed > 3)); then
    echo "==> $failed tests failed: not run again"
    return 1
  fi
  echo "==> $failed failed; once more, one at a time:"
  "$@" -v -n 0 --last-failed --last-failed-no-failures none
}

# tests NAME ARGUMENTS...: one run of pytest, in the table of times; returns its status. No test in it (-k, -m) is none.
tests() {
  local name=$1 begin=$EPOCHREALTIME code=0
  shift
  echo "==> $name"
  local run=("$CLUSTER_DIR/cluster.sh" exec "$PYTHON" -m pytest -c e2e/pytest.ini -o "cache_dir=$RUN/pytest/${name// /-}" "$@")
  "${run[@]}" || code=$?
  [ $code != 1 ] || { code=0 && again "${run[@]}" || code=$?; }
  [ $code != 5 ] || code=0
  printf '%s\t%s\t%s\n' "$name" "$(seconds_since "$begin")" "$([ $code = 0 ] || echo "FAILED (exit $code)")" >>"$RUN/stages.tsv"
  return $code
}

if [ $# -gt 0 ]; then
  tests "tests" e2e "$@" || status=$?
else
  # What the others stand on comes first, by itself; most of the rest spend their time waiting, so that two go on at a
  # time, and events under load beside them; those that take the operator away or count its writes are alone at the end.
  "$CLUSTER_DIR/cluster.sh" load &
  loading=$!
  tests "tests of cluster and API server" e2e/test_0_*.py e2e/test_7_*.py || status=$?
  wait "$loading"
  tests "tests of first use" e2e/test_1_*.py || status=$?
  tests "events under load" -m "not alone" e2e/test_8_*.py >"$LOGS/events-under-load.log" 2>&1 &
  events=$!
  tests "tests side by side" -n 2 -m "not alone" e2e/test_[2-6]_*.py e2e/test_9_*.py || status=$?
  wait "$events" || status=$?
  cat "$LOGS/events-under-load.log"
  tests "tests of the operator alone" -m alone e2e/test_[2-9]_*.py || status=$?
fi
[ $status = 0 ] || "$CLUSTER_DIR/cluster.sh" diagnose || true
exit $status
