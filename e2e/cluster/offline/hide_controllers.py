"""Changes kind's entrypoint so that systemd in a node does not see the cgroup v1 controllers that the host has not
mounted: it would mount them itself, which a container may not. kind's own undo-mount-hacks.service takes the mount away
again. Usage: hide_controllers.py FILE"""

import sys
from pathlib import Path

AFTER = "    # we don't need or want the misc controller, see comments on this function\n    remove_misc_controller\n"
HIDE = """\
    # kvern-e2e: hide controllers without a v1 hierarchy
    awk 'NR == 1 || $2 != 0' /proc/cgroups >/kind/fake-cgroups
    mount --bind /kind/fake-cgroups /proc/cgroups
"""


def hidden(entrypoint: str) -> str:
    """The changed script; raises ValueError where the place for it is not there exactly once."""
    if entrypoint.count(AFTER) != 1:
        raise ValueError("kind's entrypoint has changed: the call of remove_misc_controller is not where it was")
    return entrypoint.replace(AFTER, HIDE)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(hidden(file.read_text()))
