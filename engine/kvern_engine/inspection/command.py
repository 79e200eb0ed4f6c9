"""`kvern inspect`: finds the model, reports, prints. What there is to tell is put together in `report.py`."""

import io
import json
import shutil
from dataclasses import replace
from typing import TextIO

from kvern_engine.config import EngineConfig
from kvern_engine.inspection.report import Report, inspect_model
from kvern_engine.loading.resolve import ModelFiles, resolve_model

_COLUMNS = 100


def inspect(config: EngineConfig, out: TextIO, *, as_json: bool = False, check: bool = False) -> int:
    """Prints the report on `config.model` to `out`; returns the exit status, 1 where the files of weights are damaged
    or, with `check`, do not fit the model. Raises ValueError with a text for the user where the model cannot be found,
    its description is wrong, or a flag does not fit it."""
    files = resolve_model(config.model, config.revision)
    asked = "tensor_parallel_size" in config.model_fields_set
    report = inspect_model(files, config, config.tensor_parallel_size if asked else None)
    if check and report.weights_error is None:
        report = _checked(report, files)
    if as_json:
        out.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        _print(report, out)
    return 0 if report.weights_error is None else 1


def _print(report: Report, out: TextIO) -> None:
    from rich.console import Console

    from kvern_engine.inspection.show import show

    columns = min(shutil.get_terminal_size().columns, _COLUMNS) if out.isatty() else _COLUMNS
    text = io.StringIO()  # of its own, for rich ends the process where a pipe is closed
    show(report, Console(file=text, width=columns, force_terminal=out.isatty(), highlight=False))
    out.write(text.getvalue())


def _checked(report: Report, files: ModelFiles) -> Report:
    import torch

    from kvern_engine.loading.checkpoint import WeightsError
    from kvern_engine.models.registry import model_class
    from kvern_engine.worker.load import check_checkpoint

    try:
        check_checkpoint(model_class(report.model.architecture), report.model, torch.bfloat16, files)
    except WeightsError as error:
        return replace(report, weights_error=str(error))
    return replace(report, notes=[*report.notes, "every tensor that the model needs is there, with its shape and type"])
