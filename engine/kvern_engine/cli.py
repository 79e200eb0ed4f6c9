"""The engine's command line: `kvern serve | generate | inspect | bench | fetch`.

It parses, calls and words errors; a mistake of the user is one line on standard error and exit status 2 (wrong words)
or 1 (it could not be done), never a traceback.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvern_engine.flags import (
    FLAGS,
    FlagError,
    add_engine_flags,
    flags_json,
    make_parser,
    parse_args,
    unknown_variables,
)

USAGE = """\
usage: kvern serve MODEL [flags]                      an OpenAI-compatible server
       kvern generate MODEL [--prompt TEXT] [flags]   an answer on standard output
       kvern inspect MODEL [--json] [flags]           what a model is and where it fits; loads no weights
       kvern bench MODEL [--workload NAME ...]        measure; JSON lines on standard output
       kvern fetch MODEL [--revision REV]             bring a model here: hf://, s3:// or builtin://
       kvern COMMAND --help                           its flags
"""

# What makes no sense without a server.
_SERVER_FLAGS = [f.field for f in FLAGS.values() if f.group in ("Server", "Limits")] + [
    "served_model_name",
    "data_parallel_size",
]

# What decides how much room a model takes.
_INSPECTED = frozenset(
    (
        *("model", "revision", "dtype", "max_model_len", "trust_remote_code", "quantization", "kv_cache_dtype"),
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "max_num_seqs", "max_num_batched_tokens"),
        *("enable_chunked_prefill", "tensor_parallel_size", "pipeline_parallel_size"),
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `argv` is without the program's name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    commands = {"serve": _serve, "generate": _generate, "inspect": _inspect, "bench": _bench, "fetch": _fetch}
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command not in commands:
        print(f"kvern: {f'there is no command {command!r}' if command else 'which command?'}", file=sys.stderr)
        print(USAGE, end="", file=sys.stderr)
        return 2
    return _guarded(f"kvern {command}", commands[command], rest)


def _guarded(name: str, command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command and turn what it raises for the user into lines and an exit status."""
    try:
        return command(argv)
    except FlagError as error:
        return _complain(name, error.problems, 2)
    except (ValueError, MemoryError) as error:
        return _complain(name, str(error).splitlines() or [type(error).__name__], 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvern generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as end:  # --help
        return int(end.code or 0)


def _complain(name: str, problems: Iterable[str], status: int) -> int:
    for problem in problems:
        print(f"{name}: error: {problem}", file=sys.stderr)
    return status


def _serve(argv: list[str]) -> int:
    from kvern_engine import logs
    from kvern_engine.supervisor import StartError, serve

    if argv == ["--dump-flags-json"]:
        print(flags_json(), end="")
        return 0
    parser = make_parser("kvern serve", "Serve a model over the OpenAI API.")
    add_engine_flags(parser)
    config, _ = parse_args(parser, argv, os.environ)
    # A person sees the progress lines instead; what goes wrong shows in both.
    human = sys.stderr.isatty() and config.log_format == "text"
    level = "warning" if human and config.log_level == "info" else config.log_level
    logs.setup(level, "supervisor", human, config.log_format)
    _warn_of_environment(os.environ)
    try:
        return serve(config)
    except StartError as error:
        return _complain("kvern serve", str(error).splitlines() or [type(error).__name__], 1)


def _warn_of_environment(environ: Mapping[str, str]) -> None:
    """Say which KVERN_* variables nothing reads: a mistyped one would be ignored in silence."""
    log = logging.getLogger(__name__)
    for problem in unknown_variables(environ):
        log.warning("%s", problem)


def _generate(argv: list[str]) -> int:
    parser = make_parser("kvern generate", "Answer one prompt; it is streamed to standard output as it is made.")
    own = parser.add_argument_group("Prompt and sampling")
    own.add_argument("-p", "--prompt", help="The prompt. Default: what standard input holds.")
    own.add_argument("--system", help="System message in front of the prompt.")
    own.add_argument("--raw", action="store_true", help="Continue the text as it is, without the chat template.")
    own.add_argument("--max-tokens", help="Longest answer in tokens. Default: 512.", metavar="N")
    own.add_argument("--temperature", help="0: always the most likely token. Default: the model's.", metavar="X")
    own.add_argument("--top-p", help="Choose among the likeliest tokens that make up this share.", metavar="X")
    own.add_argument("--top-k", help="Choose among this many tokens.", metavar="N")
    own.add_argument("--stop", nargs="+", action="extend", help="End the answer at any of these texts.", metavar="TEXT")
    add_engine_flags(parser, leave_out=_SERVER_FLAGS)
    config, options = parse_args(parser, argv, os.environ)
    from kvern_engine.generate import generate

    return generate(config, options, sys.stdin, sys.stdout, sys.stderr)


def _inspect(argv: list[str]) -> int:
    parser = make_parser(
        "kvern inspect", "What a model is, what it takes, and on which GPUs it fits. Loads no weights."
    )
    own = parser.add_argument_group("Output")
    own.add_argument("--json", action="store_true", help="One JSON object; sizes in bytes, lengths in tokens.")
    own.add_argument(
        "--check",
        action="store_true",
        help="Compare the tensors of the files with those the model needs (loads torch).",
    )
    add_engine_flags(parser, leave_out=[field for field in FLAGS if field not in _INSPECTED])
    config, options = parse_args(parser, argv, os.environ)
    from kvern_engine.inspection.command import inspect

    return inspect(config, sys.stdout, as_json=options.json, check=options.check)


def _bench(argv: list[str]) -> int:
    from kvern_engine.bench import main as bench

    return bench(argv)


def _fetch(argv: list[str]) -> int:
    """`kvern fetch`; the flags of its report are the operator's."""
    from kvern_engine import logs
    from kvern_engine.fetching.command import fetch
    from kvern_engine.fetching.files import is_remote

    parser = make_parser("kvern fetch", "Bring a model into KVERN_CACHE_DIR and print where it is.")
    parser.add_argument("model", metavar="MODEL", help="hf://org/name, s3://bucket/folder or builtin://NAME.")
    parser.add_argument("--revision", help="Branch, tag or commit of an hf:// model. Default: main.", metavar="REV")
    parser.add_argument(
        "--update", action="store_true", help="Look whether the source has another version than the one that is here."
    )
    report = parser.add_argument_group("Figures while it runs")
    report.add_argument("--report-host", default="127.0.0.1", metavar="HOST", help="Address of GET /admin/fetch.")
    report.add_argument("--report-port", type=int, metavar="PORT", help="Its port; off where not given.")
    report.add_argument("--admin-token-file", metavar="FILE", help="File with the bearer token that it asks for.")
    report.add_argument("--summary-file", metavar="FILE", help="File that gets the last figures as JSON.")
    options = parser.parse_args(argv)
    if options.revision and not options.model.startswith("hf://"):
        raise FlagError([f"--revision is for hf:// models; leave it out for {options.model}"])
    if options.update and not is_remote(options.model):
        raise FlagError([f"--update is for hf:// and s3:// models; leave it out for {options.model}"])
    if options.report_port is not None and not options.admin_token_file:
        raise FlagError(["--report-port needs --admin-token-file"])
    logs.setup("info", "fetch")
    # Ends as an exception does: the lock of the cache is given back, and the next download need not wait for it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    where = None
    if options.report_port is not None:
        where = (options.report_host, options.report_port, options.admin_token_file)
    print(fetch(options.model, options.revision, update=options.update, report=where, summary=options.summary_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
