"""Shows a report of `kvern inspect` on a terminal, in at most 100 columns."""

from collections.abc import Iterator

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvern_engine.inspection.fit import Fit
from kvern_engine.inspection.report import Report

_DIM = "bright_black"


def show(report: Report, console: Console) -> None:
    """Prints it: what the model is, what its files hold, where it fits."""
    console.print(_heading(report))
    console.print(_indented(_facts(report), above=1))
    for note in report.notes:
        console.print(_indented(Text(f"Note: {note}", style="yellow"), above=1))
    console.print(_indented(_matrix(report) if _several(report) else _details(report)))
    console.print(_indented(Text(_legend(report), style=_DIM)))


def _indented(what: RenderableType, above: int = 0) -> Padding:
    return Padding(what, (above, 0, 0, 2), expand=False)


def _several(report: Report) -> bool:
    return len({fit.tensor for fit in report.fits}) > 1


def _heading(report: Report) -> Text:
    return Text.assemble(
        (report.family, "bold"), f"  {report.model.architecture}\n", (f"{report.path}  {report.kind}", _DIM)
    )


def _facts(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_DIM, no_wrap=True)
    grid.add_column()
    for name, value in _lines(report):
        grid.add_row(name, value)
    return grid


def _lines(report: Report) -> Iterator[tuple[str, RenderableType]]:
    model = report.model
    count = _count(report.parameters)
    if report.active_parameters != report.parameters and model.experts is not None:
        count += f", {_count(report.active_parameters)} of them for a token"
    yield "parameters", count
    if report.weights_error is not None:
        yield "weights", Text(report.weights_error, style="red")
    else:
        total = sum(item.nbytes for item in report.stored)
        parts = ", ".join(f"{item.dtype} {_size(item.nbytes)}" for item in report.stored)
        yield "weights", f"{_size(total)} on disk: {parts}"
    shape = f"{model.num_layers} layers of width {model.hidden_size:,}, {model.num_heads} heads of {model.head_dim}"
    shape += "" if model.num_kv_heads == model.num_heads else f" ({model.num_kv_heads} KV heads)"
    yield "shape", f"{shape}, vocabulary {model.vocab_size:,}"
    if model.experts is not None:
        yield "experts", f"{model.experts.num_experts} a layer, {model.experts.per_token} for each token"
    own = report.own_length
    context = f"{own.usual:,} tokens"
    if own.most > own.usual:
        context += f", up to {own.most:,} where asked for"
    yield "context", f"{context}{_scaling(report)}{_window(report)}"
    yield "KV cache", f"{_size(report.kv_bytes_per_token)} a token in {report.kv_dtype}"
    yield "computes in", report.dtype + (" with weights in FP8" if _fp8(report) else "")
    yield "can be split", f"--tensor-parallel-size {', '.join(map(str, report.tensor_sizes))}"


def _fp8(report: Report) -> bool:
    return report.model.fp8 is not None


def _scaling(report: Report) -> str:
    scaling = report.model.rope_scaling
    if scaling is None:
        return ""
    factor = f" x{scaling['factor']:g}" if "factor" in scaling else ""
    return f", {scaling['rope_type']} scaling{factor}"


def _window(report: Report) -> str:
    model = report.model
    if model.sliding_window is None:
        return ""
    slides = sum(model.window(layer) is not None for layer in range(model.num_layers))
    where = "all" if slides == model.num_layers else f"{slides} of {model.num_layers}"
    return f", a window of {model.sliding_window:,} in {where} layers"


def _matrix(report: Report) -> Table:
    """A card a row, a tensor parallel size a column: the longest context, and how many of max_model_len at once."""
    sizes = sorted({fit.tensor for fit in report.fits})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("fits on", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size} GPU{'s' if size > 1 else ''}", justify="right", no_wrap=True)
    by_card: dict[str, dict[int, Fit]] = {}
    for fit in report.fits:
        by_card.setdefault(fit.card, {})[fit.tensor] = fit
    for card, fits in by_card.items():
        table.add_row(card, *(_cell(fits[size]) for size in sizes))
    return table


def _cell(fit: Fit) -> Text:
    if fit.at_once:
        return Text.assemble((f"{_tokens(fit.longest)}", "green"), (f" x{_times(fit.at_once)}", _DIM))
    if fit.tokens:
        return Text(f"{_tokens(fit.longest)}", style="yellow")
    return Text("-", style=_DIM)


def _details(report: Report) -> Table:
    """A card a row, for one tensor parallel size."""
    size = report.fits[0].tensor
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{size} GPU{'s' if size > 1 else ''}", no_wrap=True)
    for name in ("weights", "overhead", "KV cache"):
        table.add_column(f"{name}\nper GPU", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True, vertical="bottom")
    table.add_column("longest\ncontext", justify="right", no_wrap=True)
    table.add_column(f"requests of\n{_tokens(report.max_model_len)} at once", justify="right", no_wrap=True)
    for fit in report.fits:
        fits = fit.tokens > 0
        style = "" if fit.at_once else "yellow" if fits else _DIM
        last = _times(fit.at_once) if fit.at_once else "-"
        row = (_size(fit.weights), _size(fit.overhead), _size(fit.room) if fits else "-")
        figures = (f"{fit.tokens:,}", f"{fit.longest:,}", last) if fits else ("does not fit", "-", "-")
        table.add_row(fit.card, *row, *figures, style=style)
    return table


def _legend(report: Report) -> str:
    length = f"{report.max_model_len:,}"
    estimate = "Weights and KV cache are exact, what an engine takes beside them is estimated."
    if not _several(report):
        return estimate
    return (
        f"The longest context in tokens; x: requests of {length} tokens at once; - : the weights do not fit.\n"
        f"{estimate} --tensor-parallel-size N shows one size in detail."
    )


def _count(number: float) -> str:
    for limit, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,.0f}"


def _size(nbytes: float) -> str:
    """In units of 1,024: 512 B, 22.5 KiB, 128 KiB, 14.9 GiB."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:,.0f} {units[0]}" if nbytes == int(nbytes) else f"{nbytes:,.1f} {units[0]}"


def _tokens(number: int) -> str:
    """131072 -> 128K and 32000 -> 32,000: a multiple of 1,024 in that unit, as the lengths of models are given."""
    return f"{number // 1024:,}K" if number and number % 1024 == 0 else f"{number:,}"


def _times(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"
