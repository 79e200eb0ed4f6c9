"""Which of two places a command looks at: what `kvern up` runs on this machine, or a cluster. Thin.

A service that runs here wins, since it was started here by hand; else the cluster that kubectl would talk to; else what
has stopped here. --cluster and --local decide it themselves, and so does any of kubectl's flags.
"""

import argparse
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvern_cli.kube.errors import NotFound
from kvern_cli.local.state import LocalState, read_all
from kvern_cli.picture import Picture, local_picture

if TYPE_CHECKING:
    from kvern_cli.kube.gather import Target


def add_flags(parser: argparse.ArgumentParser) -> None:
    """kubectl's flags and the two that choose the place."""
    parser.add_argument("-n", "--namespace", help="namespace (default: the context's; on this machine: any)")
    parser.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig (default: $KUBECONFIG, else ~/.kube/config)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="what kvern up runs on this machine, and nothing else")
    where.add_argument("--cluster", action="store_true", help="the cluster, whatever runs on this machine")


def local_states(args: argparse.Namespace) -> list[LocalState]:
    """The local services that the arguments name, also those that have stopped."""
    found = read_all()
    return [state for state in found if args.name in (None, state.name) and args.namespace in (None, state.namespace)]


def looks_at_cluster(args: argparse.Namespace, local: Iterable[LocalState]) -> bool:
    """The choice."""
    if args.local:
        return False
    if args.cluster or args.context or args.kubeconfig or getattr(args, "all_namespaces", False):
        return True
    if any(state.running for state in local):
        return False
    from kvern_cli.kube.kubeconfig import has_cluster

    return has_cluster()


def cluster_target(args: argparse.Namespace) -> "Target":
    """The cluster that the arguments lead to. Raises KubeconfigError."""
    from kvern_cli.kube.client import connect
    from kvern_cli.kube.gather import target

    return target(connect(args.kubeconfig, args.context, args.namespace), args.context, args.kubeconfig)


def picture_of(args: argparse.Namespace) -> Picture:
    """The picture of the service that the arguments name. Raises NotFound, KubeError, KubeconfigError."""
    local = local_states(args)
    if looks_at_cluster(args, local):
        from kvern_cli.kube.gather import gather

        return gather(cluster_target(args), args.name, budget=True)
    return picture_of_local(one_local(args, local))


def one_local(args: argparse.Namespace, found: list[LocalState]) -> LocalState:
    """The local service that is meant: the running one, where several namespaces have the name. Raises NotFound."""
    if not found:
        raise NotFound(unknown_locally(args.name, read_all()))
    return max(found, key=lambda state: state.running)


def picture_of_local(state: LocalState) -> Picture:
    """What a `kvern up` wrote, as a picture."""
    logs = str(state.folder / "logs")
    return local_picture(state.document, pid=state.pid, running=state.running, logs=logs, now=datetime.now(UTC))


def unknown_locally(name: str, known: Iterable[LocalState]) -> str:
    """Says what runs instead."""
    running = sorted(state.name for state in known if state.running)
    hint = f"running: {', '.join(running)}" if running else "nothing runs; start it with: kvern up FILE"
    return f"no service {name} on this machine ({hint})"


def say_place(text: str) -> None:
    """What is shown, on standard error so that standard output holds nothing but it."""
    if sys.stderr.isatty():
        print(f"\x1b[2m{text}\x1b[0m", file=sys.stderr)
    else:
        print(text, file=sys.stderr)
