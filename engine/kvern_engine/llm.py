"""The offline Python API: `LLM(model).generate(prompts)` and `.chat(messages)`, core and worker in this process (with
several ranks, the workers in processes of their own).

    from kvern_engine import LLM, SamplingParams
    with LLM("builtin://smollm2-135m") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

It turns prompts into requests and outputs into results (`offline.py`); scheduling and computing are done elsewhere.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from pydantic import ValidationError

from kvern_engine.assemble import build_core
from kvern_engine.capacity import model_shape
from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.fetching.meter import Meter
from kvern_engine.fetching.obtain import held
from kvern_engine.flags import explain
from kvern_engine.ipc import AddRequest
from kvern_engine.loading.config import read_generation_config, read_model_config
from kvern_engine.offline import Job, Prompt, check_prompt, check_tokens, parse_prompts
from kvern_engine.offline_workers import OfflineWorkers
from kvern_engine.outputs import RequestOutput
from kvern_engine.parallel.layout import Layout, check_layout
from kvern_engine.prompt_rules import bad_word_ids, truncated
from kvern_engine.request import SamplingParams
from kvern_engine.worker_client import GroupWorkerClient, InprocWorkerClient, Progress

if TYPE_CHECKING:
    from kvern_engine.core.plan import WorkerReady
    from kvern_engine.tokenizer import Tokenizer

Message = dict[str, Any]

_NO_THRESHOLD = 1 << 30  # tokens; the budget of a step is what holds


class LLM:
    """A model, ready to generate. Keyword arguments are the fields of EngineConfig (`max_model_len=4096`, ...).

    Offline, nobody watches a stream: prompts are computed as fast as a step can take them. `serving=True` schedules as
    `kvern serve` does, where a long prompt must not hold running streams up.

    Raises ValueError for arguments that are wrong, ModelNotFoundError and FetchError (both ValueErrors) where there is
    no such model or it cannot be fetched, and MemoryError where the KV cache is too small for one request of
    max_model_len.
    """

    def __init__(
        self, model: str, *, serving: bool = False, load_progress: Progress | None = None, **engine_args: Any
    ) -> None:
        if not serving:
            engine_args.setdefault("long_prefill_token_threshold", _NO_THRESHOLD)
        try:
            self.config = EngineConfig(model=model, **engine_args)
        except ValidationError as error:
            raise ValueError("\n".join(explain(error))) from None
        started = time.perf_counter()
        self._processes: OfflineWorkers | None = None
        self._kept = contextlib.ExitStack()  # fetched first where it has to be, and not evicted while we use it
        try:
            self._files = self._kept.enter_context(held(self.config.model, self.config.revision, _meter(load_progress)))
            self.model_config = read_model_config(self._files)
            self._worker = self._make_worker()
            self.worker_ready: WorkerReady = self._worker.wait_ready(load_progress)
            eos = self.model_config.eos_token_ids
            self.core = build_core(self.config, 0, self._worker, self.worker_ready, eos)
        except WorkerDiedError as error:
            self._end_processes()
            raise ValueError(error.reason) from None
        except BaseException:
            self._end_processes()
            raise
        self.start_seconds = time.perf_counter() - started
        self._ids = itertools.count()
        self._tokenizer: Tokenizer | None = None

    def _make_worker(self) -> GroupWorkerClient | InprocWorkerClient:
        """In this process, or one process a rank where the engine has several."""
        config = self.config
        if config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={config.data_parallel_size} is for `kvern serve`: offline, start one LLM an engine"
            )
        if Layout.of(config).engine_size > 1:
            check_layout(model_shape(config), Layout.of(config))
            self._processes = OfflineWorkers(config)
            return self._processes.client
        from kvern_engine.worker import create_worker

        return InprocWorkerClient(create_worker(config, 0))

    def _end_processes(self) -> None:
        self._kept.close()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    @property
    def max_model_len(self) -> int:
        return self.worker_ready.max_model_len

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, loaded at first use. Raises ValueError where the model brings none."""
        if self._tokenizer is None:
            from kvern_engine.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._files, self.config.tokenizer, self.config.chat_template)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where a caller gives none: the model's generation_config."""
        known = set(SamplingParams.__struct_fields__)
        found = {k: v for k, v in read_generation_config(self._files).items() if k in known and v is not None}
        return SamplingParams(**found)

    # ------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, batched together; the results are in the order of the prompts.

        `prompts`: a string, token ids, {"prompt": ...} or {"prompt_token_ids": [...]}, or a list of these.
        `sampling_params`: one for all, one a prompt, or None (the model's defaults).
        Raises ValueError naming the prompt by its index, before anything runs.
        """
        return self._run(parse_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self._run(
            [self._chat_prompt(m, add_generation_prompt, template_args) for m in conversations],  # type: ignore[arg-type]
            sampling_params,
            use_tqdm,
        )

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one answer, piece by piece. Leaving the loop early aborts the request."""
        jobs = self._jobs(parse_prompts(prompt), sampling_params)
        yield from self._stream(jobs[0])

    def stream_chat(self, messages: list[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """As `stream`, for a conversation."""
        yield from self._stream(self._jobs([self._chat_prompt(messages, True, {})], sampling_params)[0])

    def _stream(self, job: Job) -> Iterator[str]:
        for _ in self._steps([job]):
            if text := job.new_text():
                yield text

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        jobs = self._jobs(prompts, params)
        bar = _Bar(len(jobs)) if use_tqdm else None
        try:
            for finished in self._steps(jobs):
                if bar is not None:
                    bar.update(finished)
        finally:
            if bar is not None:
                bar.close()
        return [job.result() for job in jobs]

    def _chat_prompt(self, messages: list[Message], add_generation_prompt: bool, args: dict[str, Any]) -> Prompt:
        tokenizer = self.get_tokenizer()
        text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, **args)
        return Prompt(text, tokenizer.encode(text, add_special_tokens=False), is_chat=True)

    def _jobs(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Job]:
        """Tokenize and check everything before anything runs."""
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params has {len(each)} entries for {len(prompts)} prompts: give one for each")
        jobs = []
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            ids = self.get_tokenizer().encode(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
            if p.truncate_prompt_tokens is not None:
                ids = truncated(ids, p.truncate_prompt_tokens, max(self.max_model_len - (p.max_tokens or 1), 1))
            check_prompt(i, ids, self.max_model_len, self.model_config.vocab_size)
            check_tokens(p, self.model_config.vocab_size)
            if p.bad_words:
                p = replace(p, bad_words_token_ids=bad_word_ids(self.get_tokenizer(), p.bad_words))
            tokenizer = self.get_tokenizer() if p.detokenize else None
            jobs.append(Job(i, str(next(self._ids)), prompt.text, ids, p, tokenizer, prompt.is_chat))
        return jobs

    def _steps(self, jobs: list[Job]) -> Iterator[list[Job]]:
        """Run the jobs to their ends; yields, after each step, those that ended in it. Aborts them when left early."""
        now = time.monotonic()
        open_jobs = {job.request_id: job for job in jobs}
        core = self.core
        try:
            for job in jobs:
                ids, eos = job.prompt_token_ids, job.eos_token_ids
                core.add_request(AddRequest(job.request_id, 0, ids, job.params, now, eos_token_ids=eos))
            while open_jobs:
                ended = []
                stopped: list[tuple[str, int]] = []
                for output in core.step().get(0, ()):
                    open_job = open_jobs.get(output.request_id)  # None: after its stop string
                    if open_job is not None and open_job.absorb(output):
                        del open_jobs[output.request_id]
                        ended.append(open_job)
                    if open_job is not None and open_job.stopped:
                        stopped += open_job.stopped
                        open_job.stopped = []
                if stopped:
                    core.abort((), stopped)
                yield ended
        finally:
            if open_jobs:
                core.abort(list(open_jobs))
            self._settle()

    def _settle(self) -> None:
        """Read back what is still in flight, so that the next call starts from an idle engine."""
        while self._worker.alive and not self.core.idle:
            self.core.step()

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Give the device's memory back; the object cannot be used afterwards."""
        self.core.close()
        self.__dict__.pop("core", None)
        self.__dict__.pop("_worker", None)
        self._end_processes()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _meter(progress: Progress | None) -> Meter | None:
    """What a download tells is told as a phase of loading."""
    if progress is None:
        return None
    return Meter(lambda f: progress(f"{f.phase.lower()} {f.uri}", f.done / f.total if f.total else 0.0))


class _Bar:
    """A progress bar over prompts with tokens a second; redrawn at most ten times a second."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", dynamic_ncols=True, mininterval=0.1)
        self._start, self._tokens_in, self._tokens_out = time.perf_counter(), 0, 0

    def update(self, ended: list[Job]) -> None:
        if not ended:
            return
        self._tokens_in += sum(len(job.prompt_token_ids) for job in ended)
        self._tokens_out += sum(job.num_output_tokens for job in ended)
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rates = f"in {self._tokens_in / seconds:.0f} tok/s, out {self._tokens_out / seconds:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(len(ended))

    def close(self) -> None:
        self._bar.close()
