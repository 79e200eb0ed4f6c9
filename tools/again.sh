#!/usr/bin/env bash
# again.sh MOST PYTEST...: run the tests that failed in the last run of this command once more, one at a time with nothing
# of it beside them. A test that passes now was disturbed, and is named; one that fails again fails the build, and so do
# more than MOST at once.
set -euo pipefail
most=$1
shift
alone=("$@" -n 0 --last-failed --last-failed-no-failures none)
failed=$("${alone[@]}" --collect-only -q 2>/dev/null | grep -c :: || true)
if ((failed == 0 || failed > most)); then
  echo "==> $failed tests failed: not run again"
  exit 1
fi
echo "==> $failed failed while others ran beside them; once more, alone:"
"${alone[@]}" -v
echo "==> passed alone. These depend on the machine's load, which is a fault of theirs: see the list above"
