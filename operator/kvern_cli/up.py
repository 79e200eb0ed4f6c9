"""`kvern up FILE`: words around the local runner. Checks the manifest, takes the lock and the port, prints what people
need, and turns the outcome into an exit status.
"""

import argparse
import asyncio
import socket
import sys
from pathlib import Path

from kvern_cli.local.cluster import Machine
from kvern_cli.local.gpus import visible_gpus
from kvern_cli.local.limits import refusals
from kvern_cli.local.runner import Runner, UpError
from kvern_cli.local.state import AlreadyRunning, StateFolder
from kvern_cli.view import make_view
from kvern_operator.api.load import ManifestError, load_file
from kvern_operator.api.types import InferenceService

DEFAULT_PORT = 8000
ASK_TIMEOUT = 600.0


def up(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Run until stopped, or until the question is answered. 0: ended well; 1: not; 2: wrong words; 130: cut short."""
    try:
        claims = parse_claims(args.claim)
        service = load_file(args.file)
        refused = refusals(service, claims.keys())
        if refused:
            raise ManifestError(refused, args.file)
        with StateFolder(service.metadata.namespace, service.metadata.name) as state:
            port, note = choose_port(args.port)
            machine = machine or Machine(visible_gpus(), claims)
            return _run(args, service, state, port, note, machine)
    except (ManifestError, ValueError) as error:
        for line in str(error).splitlines():
            print(f"kvern up: {line}", file=sys.stderr)
        return 2
    except (AlreadyRunning, UpError, OSError) as error:
        print(f"kvern up: {error}", file=sys.stderr)
        return 1


def _run(
    args: argparse.Namespace, service: InferenceService, state: StateFolder, port: int, note: str, machine: Machine
) -> int:
    timeout = args.timeout if args.timeout is not None else ASK_TIMEOUT if args.ask else None
    with make_view() as view:
        if note:
            view.say(note)
        runner = Runner(Path(args.file), service, state, port, machine, view)
        return asyncio.run(runner.run(args.ask, timeout))


def parse_claims(texts: list[str]) -> dict[str, Path]:
    """NAME=FOLDER -> folder, which must exist. Raises ValueError."""
    claims = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        path = Path(folder).expanduser().resolve()
        if not equals or not name or not folder:
            raise ValueError(f"--claim {text}: write NAME=FOLDER")
        if not path.is_dir():
            raise ValueError(f"--claim {text}: there is no folder {path}")
        claims[name] = path
    return claims


def choose_port(wanted: int | None) -> tuple[int, str]:
    """The port of the service and a note for people. Raises OSError where the wanted one is taken."""
    if wanted == 0:
        return _free(0), ""
    if wanted is not None:
        try:
            return _free(wanted), ""
        except OSError as error:
            raise OSError(f"--port {wanted}: {error.strerror}; name another, or 0 for a free one") from None
    try:
        return _free(DEFAULT_PORT), ""
    except OSError:
        port = _free(0)
        return port, f"port {DEFAULT_PORT} is taken; using {port} (--port chooses)"


def _free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        number: int = probe.getsockname()[1]
        return number
