#!/usr/bin/env bash
# again.sh PYTEST: run the tests that failed in the last run once more, one at a time with nothing beside them. A test
# that passes now was disturbed, and is named; one that fails again fails the build, and so do more than five at once.
set -euo pipefail
failed=$("$1" --last-failed --last-failed-no-failures none --collect-only -q 2>/dev/null | grep -c :: || true)
if ((failed == 0 || failed > 5)); then
  echo "==> $failed tests failed: not run again"
  exit 1
fi
echo "==> $failed failed while another file ran beside them; once more, alone:"
"$1" -v --last-failed --last-failed-no-failures none
echo "==> passed alone. These depend on the machine's load, which is a fault of theirs: see the list above"
