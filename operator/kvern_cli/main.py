"""`kvern`: finds the command and hands over. Imports nothing heavy, so that --help and errors come at once."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("up", "status", "explain", "logs", "validate", "down")
ENGINE_COMMANDS = {
    "serve": "an OpenAI-compatible server for one model",
    "generate": "an answer on standard output",
    "inspect": "what a model is, what it takes, and on which GPUs it fits",
    "bench": "measure a model; JSON lines on standard output",
    "fetch": "bring a model here: from a hub, a bucket, or a built-in one",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ENGINE_COMMANDS:
        return _engine(argv)
    if argv and (problem := _unknown(argv[0])):
        print(f"kvern: {problem}", file=sys.stderr)
        return 2
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # --help, --version, a wrong flag
        return int(end.code or 0)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # kvern status | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _unknown(word: str) -> str | None:
    """What is wrong with a first word that is no command, with the nearest one; None where nothing is."""
    known = [*COMMANDS, *ENGINE_COMMANDS]
    if word.startswith("-") or word in known:
        return None
    near = difflib.get_close_matches(word, known, n=1)
    return f"unknown command {word!r}; " + (f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}")


def _engine(argv: list[str]) -> int:
    try:
        from kvern_engine.cli import main as engine_main
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
        print(
            f"kvern {argv[0]}: the engine is not installed here (no module {missing}): pip install 'kvern[engine]'",
            file=sys.stderr,
        )
        return 1
    return engine_main(argv)


def _run(args: argparse.Namespace) -> int:
    if args.command == "up":
        from kvern_cli.up import up

        return up(args)
    if args.command == "validate":
        from kvern_cli.validate import validate

        return validate(args.files)
    if args.command == "down":
        from kvern_cli.status import down

        return down(args)
    return _look(args)


def _look(args: argparse.Namespace) -> int:
    """status, explain and logs; what keeps them from looking is said in words."""
    from kvern_cli.kube.errors import LookError

    try:
        if args.command == "logs":
            from kvern_cli.logs import logs

            return logs(args)
        from kvern_cli.status import explain, status

        return explain(args) if args.command == "explain" else status(args)
    except LookError as error:
        print(f"kvern {args.command}: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The words of the command line; docs/reference/cli.md prints them."""
    from kvern_operator import __version__

    engine = "\n".join(f"  {name:<10} {text}" for name, text in ENGINE_COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvern",
        description="Serve language models: one InferenceService, on this machine or in a cluster.",
        epilog=f"commands of the engine (pip install 'kvern[engine]'):\n{engine}\n\nkvern COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvern {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    _add_up(commands)
    validate = commands.add_parser("validate", help="check manifests and print every error", description="Check files.")
    validate.add_argument("files", nargs="+", metavar="FILE", help="YAML file with one InferenceService")
    _add_looks(commands)
    down = commands.add_parser("down", help="stop a service that kvern up runs in another terminal")
    down.add_argument("name", nargs="?", metavar="NAME", help="which service; needed where several run")
    down.add_argument("-n", "--namespace", help="namespace of the service (default: any)")
    return parser


def _add_looks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from kvern_cli.place import add_flags

    status = commands.add_parser(
        "status",
        help="what runs here or in a cluster, as kubectl would say it",
        description="Services with their replicas, or one of them with conditions and pods. What kvern up runs on this "
        "machine comes first; where nothing does, the cluster that kubectl talks to is asked.",
    )
    status.add_argument("name", nargs="?", metavar="NAME", help="one service, with conditions and pods")
    add_flags(status)
    status.add_argument("-A", "--all-namespaces", action="store_true", help="the services of all namespaces")
    status.add_argument("-w", "--watch", action="store_true", help="go on showing changes, until Ctrl-C")
    status.add_argument("-o", "--output", choices=["wide", "yaml", "json"], help="another form")
    explain = commands.add_parser(
        "explain",
        help="in sentences: what a service wants, what is wrong, why, and what to do",
        description="What the service wants, what is there, what is wrong and why, what was decided last, what to do.",
    )
    explain.add_argument("name", metavar="NAME", help="the service")
    add_flags(explain)
    explain.add_argument(
        "--what-if",
        metavar="tensor=N,replicas=N",
        help="what the model expects of another tensor size, another number of replicas, or both",
    )
    _add_logs(commands)


def _add_logs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from kvern_cli.place import add_flags

    logs = commands.add_parser(
        "logs",
        help="the logs of a service, engines and routers in one stream",
        description="The logs of the pods of a service, merged by time, each line with the pod that wrote it.",
    )
    logs.add_argument("name", metavar="NAME", help="the service")
    add_flags(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines and new pods, until Ctrl-C")
    logs.add_argument("-p", "--previous", action="store_true", help="of the containers before their last restart")
    logs.add_argument(
        "--component", choices=["engine", "router", "fetch"], help="of engines or routers only, or of the download"
    )
    logs.add_argument("--replica", metavar="N", help="of one replica: its number, or its name")
    logs.add_argument("--tail", type=_lines, default=200, metavar="N", help="last lines of each pod (200); -1: all")
    logs.add_argument("--since", type=_span, metavar="TIME", help="not older than this, such as 90s, 15m or 2h")
    logs.add_argument("--timestamps", action="store_true", help="the time before each line")
    logs.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        help="the pod before each line (default: where there are several)",
    )


def _lines(text: str) -> int:
    try:
        return max(int(text), -1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; -1 stands for all") from None


def _span(text: str) -> int:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time; write 90s, 15m, 2h or 1d")
    return int(number) * units[unit]


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    up = commands.add_parser(
        "up",
        help="run an InferenceService on this machine",
        description="Run an InferenceService on this machine: the operator's own reconcile, with processes for pods. "
        "A changed FILE is carried out at once. Ctrl-C drains and stops; twice, stops now.",
    )
    up.add_argument("file", metavar="FILE", help="YAML file with one InferenceService")
    up.add_argument("--ask", metavar="TEXT", help="ask once the service answers, print the answer, stop")
    up.add_argument("--port", type=_port, help="port of the service on 127.0.0.1 (default: 8000, or a free one)")
    up.add_argument(
        "--timeout",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="give up where the service does not answer in time (default: 600 with --ask, else never)",
    )
    up.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a folder that stands for a PersistentVolumeClaim (pvc:// models, cache.claimName)",
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535, or 0 for a free one")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
