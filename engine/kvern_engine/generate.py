"""`kvern generate`: one prompt in, one answer streamed out. The Python API does the work."""

import argparse
from typing import Any, TextIO

from kvern_engine.config import EngineConfig
from kvern_engine.flags import FlagError
from kvern_engine.request import SamplingParams

_MAX_TOKENS = 512
_NUMBERS: dict[str, type] = {"max_tokens": int, "top_k": int, "temperature": float, "top_p": float}


def sampling_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given on the command line. Raises FlagError."""
    values: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        text = getattr(options, name)
        if text is None:
            continue
        try:
            values[name] = kind(text)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise FlagError([f"--{name.replace('_', '-')}: {text!r} is not {noun}"]) from None
    if options.stop:
        values["stop"] = tuple(options.stop)
    return values


def read_prompt(options: argparse.Namespace, stdin: TextIO) -> str:
    """--prompt, or all of standard input. Raises FlagError where both are missing."""
    if options.prompt is not None:
        return str(options.prompt)
    if stdin.isatty():
        raise FlagError(["no prompt: give --prompt TEXT, or write it to standard input"])
    text = stdin.read().strip("\n")
    if not text:
        raise FlagError(["the prompt on standard input is empty"])
    return text


def generate(config: EngineConfig, options: argparse.Namespace, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> int:
    """Load the model, stream the answer to `stdout`; progress goes to `stderr` where that is a terminal."""
    overrides = sampling_overrides(options)
    prompt = read_prompt(options, stdin)
    try:
        SamplingParams(**overrides)  # wrong values are told before the model is loaded
    except ValueError as error:
        raise FlagError([str(error)]) from None

    from kvern_engine.llm import LLM

    def progress(phase: str, fraction: float) -> None:
        if stderr.isatty():
            stderr.write(f"\r\x1b[K{phase} {fraction * 100:3.0f} %")
            stderr.flush()

    with LLM(load_progress=progress, **config.model_dump(exclude_unset=True)) as llm:
        if stderr.isatty():
            stderr.write("\r\x1b[K")
        defaults = {k: getattr(d, k) for d in [llm.get_default_sampling_params()] for k in d.__struct_fields__}
        params = SamplingParams(**{**defaults, "max_tokens": _MAX_TOKENS, **overrides})
        if options.raw or not llm.get_tokenizer().chat_template:
            pieces = llm.stream(prompt, params)
        else:
            system = [{"role": "system", "content": options.system}] if options.system else []
            pieces = llm.stream_chat([*system, {"role": "user", "content": prompt}], params)
        for piece in pieces:
            stdout.write(piece)
            stdout.flush()
    stdout.write("\n")
    return 0
