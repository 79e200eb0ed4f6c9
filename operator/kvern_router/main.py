"""`kvern-router`: command line, signals, exit codes. SIGTERM and SIGINT drain; a second one ends at once.

Exit codes: 0 after a drain, 1 when it cannot start (a message says why) or was told twice, 2 for a wrong flag.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Sequence

from kvern_router.accesslog import AccessLog, JsonFormatter
from kvern_router.router import Router
from kvern_router.settings import Settings, parse_args

log = logging.getLogger("kvern.router")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop; returns the exit code."""
    settings = parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    access_log = AccessLog() if settings.access_log else None
    router = Router(settings, access_log)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await router.start()
    except (OSError, ValueError) as error:
        log.error("cannot start: %s", error)
        return 1
    log.info("listening on http://%s, metrics on http://%s/metrics", router.address, router.metrics_address)
    await signals.get()
    drain = asyncio.create_task(router.drain())
    again = asyncio.create_task(signals.get())
    await asyncio.wait((drain, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if access_log is not None:
        access_log.close()
    if not drain.done():
        log.warning("told twice: ending at once")
        return 1
    log.info("drained" if drain.result() else "ended at the drain timeout")
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.Loop
    return None


def _raise_file_limit() -> None:
    """Each request needs two descriptors; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
