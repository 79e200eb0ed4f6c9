"""`kvern fetch MODEL`: brings a model here and prints where it is. Also what the Job of a cache claim runs."""

import json
import sys
from pathlib import Path

from kvern_engine.fetching.errors import FetchError
from kvern_engine.fetching.files import is_remote
from kvern_engine.fetching.lines import shown
from kvern_engine.fetching.meter import Meter
from kvern_engine.fetching.obtain import obtain
from kvern_engine.fetching.report import ReportServer, document, shape_of


def fetch(
    model: str,
    revision: str | None,
    *,
    update: bool = False,
    report: tuple[str, int, str] | None = None,
    summary: str | None = None,
) -> Path:
    """Bring it here; returns where it is. `report`: host, port and token file of GET /admin/fetch. `summary`: a
    file that gets the last figures and the model's shape as JSON. Raises FetchError and ValueError, whose text is for
    the user."""
    if not is_remote(model):
        return _fetch_builtin(model)
    server = None
    with shown(sys.stderr.isatty()) as meter:
        try:
            if report is not None:
                server = _serve_report(report, meter)
            files = obtain(model, revision, meter, update=update)
            if summary is not None:
                words = {**document(meter.figures()), "shape": shape_of(files)}
                Path(summary).write_text(json.dumps(words))
        except OSError as error:
            raise FetchError(f"{error.filename or report}: {error.strerror}") from None
        finally:
            if server is not None:
                server.close()
    return files.path


def _serve_report(report: tuple[str, int, str], meter: Meter) -> ReportServer:
    host, port, token_file = report
    token = Path(token_file).read_text().strip()
    if not token:
        raise FetchError(f"{token_file} is empty; it must hold the admin token")
    return ReportServer(host, port, token, meter.figures)


def _fetch_builtin(model: str) -> Path:
    from kvern_engine.loading.fetch import fetch_builtin
    from kvern_engine.loading.resolve import HUB_ID

    if "/" in model.removeprefix("builtin://"):
        right = f"hf://{model}" if HUB_ID.fullmatch(model) else "hf://org/name, s3://bucket/folder or builtin://NAME"
        raise FetchError(f"cannot fetch {model!r}: write {right}; what lies on this machine needs no fetching")
    shown_line = ""

    def progress(what: str, done: float) -> None:
        nonlocal shown_line
        line = f"{what} {done * 100:3.0f} %"
        if sys.stderr.isatty() and line != shown_line:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            shown_line = line

    try:
        files = fetch_builtin(model, progress)
    finally:
        if shown_line:
            sys.stderr.write("\n")
    return files.path
