"""Worker: owns one device, its weights, the KV arena and the row tables; runs the steps it is given.

It lives as long as its pod and belongs to whichever engine core sends it plans. What it decides (formats, lengths,
sizes) is in `limits.py` and `memory.py`; what a step does is in `runner.py`.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import StepPlan, WorkerReady
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.remote_code import remote_code_note
from kvern_engine.loading.resolve import ModelFiles, resolve_model
from kvern_engine.model_config import ModelConfig
from kvern_engine.models.registry import CausalLM, model_class
from kvern_engine.parallel.groups import ParallelContext, init_parallel
from kvern_engine.parallel.layout import Layout, check_layout
from kvern_engine.parallel.pod_groups import PodGroups
from kvern_engine.worker import kv_scales, limits, memory
from kvern_engine.worker.graphs import CAPTURED_AT_START, DecodeGraphs
from kvern_engine.worker.invariant import first_difference, probe_plans
from kvern_engine.worker.load import check_checkpoint, load_weights, random_weights
from kvern_engine.worker.offload import (
    NO_OFFLOAD,
    CudaCopies,
    OffloadPlan,
    check_host_memory,
    layer_bytes,
    offload,
    pin_for_cuda,
    plan_offload,
)
from kvern_engine.worker.pending import Pending
from kvern_engine.worker.profile_plan import profile_plan
from kvern_engine.worker.runner import Runner
from kvern_engine.worker.stages import StageLink
from kvern_engine.worker.tables import RowTables
from kvern_engine.worker.warm_up import warm_other_layouts
from kvern_kernels import hopper_attention, large_products, vendor_attention

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
CPU_LAYOUT_BYTES = 2 << 30  # up to this many bytes of weights, a CPU keeps them in two layouts (`Linear`)
_WARM_UP_TOKENS = 16  # on a CPU, where no memory is measured


class Worker:
    """See `load` and `execute`; the latter is called by one thread, in the order of the plans.

    Where an engine has several ranks, each is a worker in a process of its own; they meet at `rendezvous`
    (`init_parallel`) while they load, then all get the same plans. `parallel`: they have met already. `stays_connected`
    (None: as `limits.stays_connected` says): to all ranks of the pod, for changes of the layout.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        parallel: ParallelContext | None = None,
        rendezvous: str | None = None,
        stays_connected: bool | None = None,
    ) -> None:
        self.config, self.rank = config, rank
        self.layout = Layout.of(config)
        self._rendezvous = rendezvous
        environ = os.environ.get
        self._place = limits.place_in_pod(environ("KVERN_LOCAL_RANK"), environ("KVERN_LOCAL_WORLD"), self.layout, rank)
        self.device = _device(config.device, self._place.rank)
        if stays_connected is None:
            stays_connected = limits.stays_connected(os.environ, config, self.device.type)
        self._stays_connected = stays_connected and parallel is None and self.layout.world > 1
        self.groups: PodGroups | None = None
        if parallel is None and self.layout.engine_size == 1 and not self._stays_connected:
            parallel = ParallelContext.single(rank, self.layout)
        self.parallel = parallel
        self.memory_used = 0  # bytes on the device beside the KV cache at the peak of a step
        self.most_kv_bytes: int | None = None  # where a switch leaves less room than a start does
        self.lost_kv = False  # K and V of its blocks are gone since its core knew them: a switch had no room for them
        self.is_asynchronous = self.device.type == "cuda"  # execute returns before the step is over
        self.runner: Runner | None = None
        self._link: StageLink | None = None
        self._seconds: dict[str, float] = {}
        self._quantization: str | None = None
        self._fp8_kv = False
        self._fit = False

    def load(self, progress: Progress | None = None) -> WorkerReady:
        """Loads the weights, measures what a step takes and sizes the KV arena.

        `progress` gets (phase, share of it that is done). Raises ValueError (ModelNotFoundError, ModelConfigError,
        WeightsError) or MemoryError with a text for the user.
        """
        report = progress or (lambda phase, fraction: None)
        self._prepare_device()
        with self._phase("resolve", report):
            files = resolve_model(self.config.model, self.config.revision)
            model_config = read_model_config(files)
            _check_load_format(self.config.load_format, files)
            check_layout(model_config, self.layout)
            self._note_remote_code(files)
            length = limits.choose_max_model_len(
                self.config.max_model_len, limits.own_length(model_config), limits.allows_long(os.environ)
            )
            self.max_model_len, self._fit = length.tokens, length.fit
            if length.note:
                log.warning(length.note)
            self.step_limits = limits.step_limits(
                self.config, self.device.type, self._device_name(), self.max_model_len
            )
            self._quantization, self._fp8_kv = limits.fp8_choice(self.config, model_config)
            quantizable = model_class(model_config.architecture).quantizable
            limits.check_quantizable(model_config, self._quantization, quantizable)
            limits.check_offload(self.config.cpu_offload_gb, self.device.type, self._quantization)
            limits.check_invariant(self.config, model_config)
            dtype = self._dtype(model_config)
        if self.parallel is None:
            with self._phase("join", report):
                self.parallel = self._join()
        with self._phase("weights", report), self._out_of_memory("the weights"):
            weight_bytes = self._load_model(files, model_config, dtype, lambda share: report("weights", share))
        if self.device.type == "cuda":
            if not self.model.capturable:
                log.warning(
                    "%s runs without CUDA graphs and decodes slowly: its windows, soft caps or experts have no GPU "
                    "kernels yet",
                    model_config.architecture,
                )
            with self._phase("products", report), self._out_of_memory("one step (see max_num_batched_tokens)"):
                own_attention = self._choose_kernels(dtype)
        with self._phase("profile", report), self._out_of_memory("one step (see max_num_batched_tokens)"):
            used = self.memory_used = self._profile()
        with self._phase("kv_cache", report), self._out_of_memory("the KV cache"):
            size = self._size_kv_cache(used)
            self.runner = self._make_runner(self._arena(size.num_blocks))
        if self.config.batch_invariant:
            with self._phase("invariance", report):
                self._check_invariance(self.runner, size.num_blocks)
        if self.uses_graphs:
            with self._phase("graphs", report), self._out_of_memory("CUDA graphs (see enforce_eager)"):
                decode, mixed = self.runner.add_graphs()
                mixed.capture(mixed.sizes, lambda share: report("graphs", share / 2))
                decode.capture(_sizes_at_start(decode), lambda share: report("graphs", 0.5 + share / 2))
                torch.cuda.synchronize(self.device)
        if self.device.type == "cuda" and not own_attention:
            with self._phase("attention", report), self._out_of_memory("attention over a long prompt"):
                self._warm_up_attention(dtype)
        log.info("worker ready: %s", ", ".join(f"{name} {took:.2f} s" for name, took in self._seconds.items()))
        return WorkerReady(
            rank=self.rank,
            num_blocks=size.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            kv_bytes=size.num_bytes,
            weight_bytes=weight_bytes,
            device=self._device_name(),
            dtype=str(dtype).removeprefix("torch."),
            load_seconds=self._seconds,
            max_num_seqs=self.step_limits.max_num_seqs,
            max_num_batched_tokens=self.step_limits.max_num_batched_tokens,
            sliding_window=limits.shared_window(model_config, self.max_model_len),
        )

    def execute(self, plan: StepPlan, return_logits: bool = False) -> Pending:
        """Launches one step; `Pending.result()` reads it back. `return_logits`: see `Runner.execute`."""
        if self.runner is None:
            raise RuntimeError("load() comes before execute()")
        return self.runner.execute(plan, return_logits)

    def reset(self) -> None:
        """Forgets every row; weights and arena stay."""
        if self._link is not None:
            self._link.catch_up_with_all()
        self.tables.clear()

    @property
    def answers(self) -> bool:
        """This rank's results are the engine's."""
        return self.rank == self.layout.answering_rank(self.layout.coordinates(self.rank)[0])

    @property
    def knows_tokens(self) -> bool:
        """This rank's results hold the sampled tokens: all ranks of the last stage have the same ones."""
        return self.layout.coordinates(self.rank)[1] == self.layout.pipeline - 1

    @property
    def _most_tokens(self) -> int:
        return self.step_limits.max_num_batched_tokens

    @property
    def uses_graphs(self) -> bool:
        # A graph is a whole step, from the row tables to the sampled tokens: a stage of several cannot be one. Ranks of
        # a stage capture the same graphs in the same order, with NCCL's all-reduces in them.
        alone = self.layout.pipeline == 1
        eager = self.config.enforce_eager or self.config.batch_invariant  # graphs have as many sizes as batches
        eager = eager or self.config.cpu_offload_gb > 0  # copies from the host are none of a graph's nodes
        return self.device.type == "cuda" and not eager and alone and self.model.capturable

    @contextmanager
    def _phase(self, name: str, report: Progress) -> Iterator[None]:
        report(name, 0.0)
        begin = time.perf_counter()
        yield
        self._seconds[name] = round(time.perf_counter() - begin, 3)
        report(name, 1.0)

    @contextmanager
    def _out_of_memory(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{self._device_name()} has too little memory for {what}: {error}") from error
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):
                raise
            raise MemoryError(f"this machine has too little memory for {what}: {error}") from error

    def _prepare_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        threads = limits.cpu_threads(
            os.environ.get("KVERN_CPU_THREADS"),
            os.environ.get("OMP_NUM_THREADS"),
            len(os.sched_getaffinity(0)),
            self._place.world,
        )
        torch.set_num_threads(limits.invariant_threads(threads) if self.config.batch_invariant else threads)

    def _device_name(self) -> str:
        return "cpu" if self.device.type == "cpu" else f"{self.device} {torch.cuda.get_device_name(self.device)}"

    def _note_remote_code(self, files: ModelFiles) -> None:
        note = remote_code_note(files, self.config.trust_remote_code)
        if note is not None and self.rank == 0:
            log.log(logging.WARNING if self.config.trust_remote_code else logging.INFO, note)

    def _dtype(self, model: ModelConfig) -> torch.dtype:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        cache = self.config.kv_cache_dtype
        limits.check_fp8(self.config.quantization, self.device.type, capability, cache, model.fp8 is not None)
        choice = limits.choose_dtype(self.config.dtype, self.device.type, capability, model.architecture)
        if choice.note:
            log.warning(choice.note)
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[choice.dtype]

    def _join(self) -> ParallelContext:
        if self._rendezvous is None:
            raise ValueError(f"{self.layout} has several ranks an engine: each needs a process and a rendezvous")
        engine = self.layout.coordinates(self.rank)[0]
        timeout, through_peers = self.config.distributed_timeout_seconds, not self.config.disable_custom_all_reduce
        if self._stays_connected:
            everybody = f"{self._rendezvous.rpartition('/')[0]}/rendezvous-pod"
            self.groups = PodGroups.join(self.rank, self.layout.world, everybody, self.device, timeout, through_peers)
            return self.groups.context(self.layout)
        return init_parallel(self.layout, engine, self.rank, self._rendezvous, self.device, timeout, through_peers)

    def _make_runner(self, arena: list[Tensor]) -> Runner:
        invariant = self.config.batch_invariant
        return Runner(self.model, self.tables, arena, self._most_tokens, self._link, invariant=invariant)

    def _check_invariance(self, runner: Runner, num_blocks: int) -> None:
        """Tries what `batch_invariant` promises. Raises ValueError where it does not hold on this machine."""
        sizes = self.step_limits.max_num_seqs, self.max_model_len, self.config.block_size, num_blocks
        ways = []
        for plans in probe_plans(self.tables.vocab_size, *sizes):
            logits = [runner.execute(plan, return_logits=True).logits for plan in plans]
            ways.append([found[0] for found in logits if found])
            self.reset()
        difference = first_difference(ways) if all(ways) else None  # a stage but the last has no logits
        if difference is not None:
            raise ValueError(
                f"batch_invariant does not hold on {self._device_name()}: the same tokens beside others had logits "
                f"that differ by {difference:.3g}; leave it off"
            )

    def _load_model(
        self, files: ModelFiles, config: ModelConfig, dtype: torch.dtype, report: Callable[[float], None]
    ) -> int:
        build = model_class(config.architecture)
        if self.config.load_format != "dummy":
            check_checkpoint(build, config, dtype, files)
        plan = self._plan_offload(build, config, dtype)
        self.model: CausalLM = build(
            config,
            max_positions=self.max_model_len,
            dtype=dtype,
            device=self.device,
            parallel=self.parallel,
            host_layers=plan.layers,
            invariant=self.config.batch_invariant,
        )
        if self.config.load_format == "dummy":
            size = random_weights(self.model, self.config.seed)
        else:
            size = load_weights(self.model, files, report)
        if self._quantization is not None:
            size -= self.model.quantize_fp8(per_channel=self._quantization == "fp8_per_channel")
        elif self.device.type == "cpu" and size <= CPU_LAYOUT_BYTES:
            self.model.add_cpu_layouts()
        if plan.layers:
            offload(self.model, plan, CudaCopies(self.device), pin_for_cuda)
            size -= plan.freed
        self.tables = RowTables(
            max_num_seqs=self.step_limits.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.config.block_size,
            vocab_size=config.vocab_size,
            device=self.device,
        )
        self._prepare_fp8_kv(config)
        if self.parallel is not None and self.parallel.pipeline is not None:
            self._link = StageLink(self.parallel.pipeline, self.tables, config.hidden_size, dtype)
        return size

    def _prepare_fp8_kv(self, config: ModelConfig) -> None:
        if not self._fp8_kv:
            if self.config.calculate_kv_scales:
                log.warning("calculate_kv_scales has no effect: the KV cache is not in FP8 (kv_cache_dtype)")
            return
        if self.config.calculate_kv_scales:
            assert self.parallel is not None
            block_size, group = self.config.block_size, self.parallel.tensor
            found = kv_scales.calculate(self.model, self.tables, group, self._most_tokens, block_size)
            log.info("scales of the KV cache: K %.3g to %.3g, V %.3g to %.3g", *kv_scales.spans(found))
        elif config.fp8 is None or not config.fp8.kv_scales:
            log.warning(
                "the model brings no scales for a KV cache in FP8: K and V are stored as they are, to 448 "
                "(calculate_kv_scales finds some)"
            )
        self.model.use_fp8_kv()

    def _plan_offload(self, build: type[CausalLM], config: ModelConfig, dtype: torch.dtype) -> OffloadPlan:
        wanted = int(self.config.cpu_offload_gb * memory.GIB)
        if not wanted:
            return NO_OFFLOAD
        assert self.parallel is not None
        plan = plan_offload(layer_bytes(build, config, dtype, self.parallel), wanted)
        check_host_memory(plan, self.config.cpu_offload_gb, memory.available_host_memory() // self._place.world)
        log.warning("cpu_offload_gb=%g: %s", self.config.cpu_offload_gb, plan)
        return plan

    def _arena(self, num_blocks: int) -> list[Tensor]:
        """The KV cache of this rank: a tensor [2, Hkv, num_blocks, block_size, head_dim] of its heads for each of its
        layers, each with memory of its own, which can be given back while others are in use."""
        return [self.arena_layer(num_blocks) for _ in range(self.model.shard.num_layers)]

    def arena_layer(self, num_blocks: int) -> Tensor:
        """One of them, of zeros."""
        shard, head_dim = self.model.shard, self.model.config.head_dim
        shape = (2, shard.kv_heads.size, num_blocks, self.config.block_size, head_dim)
        dtype = self._kv_dtype
        size = math.prod(shape) * dtype.itemsize
        if self.device.type == "cuda":
            return torch.zeros(size, dtype=torch.uint8, device=self.device).view(dtype).view(shape)
        # numpy's zeros are pages that the kernel maps when they are first written; torch's would be written now.
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)

    @property
    def _kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self._fp8_kv else self.model.dtype

    def _profile(self) -> int:
        """Runs the largest step there can be (on a CPU a small one, to warm up); bytes in use on the device at its
        peak.

        All its KV goes to one block, so that no arena is needed yet.
        """
        tokens, rows = self._most_tokens, self.step_limits.max_num_seqs
        if self.device.type != "cuda":
            tokens, rows = min(tokens, _WARM_UP_TOKENS), 1
        runner = self._make_runner(self._arena(1))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        plan = profile_plan(tokens, rows, self.max_model_len, self.config.block_size)
        runner.execute(plan).result()
        self.reset()
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        graphs = self._measure_graphs(runner) if self.uses_graphs else 0
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        foreign = total - free - torch.cuda.memory_reserved(self.device)  # the driver's, other processes'
        return foreign + peak + graphs

    def _measure_graphs(self, runner: Runner) -> int:
        """Bytes that the graphs will take, from the largest ones: the first bring the memory that all share, one more
        shows what each one adds."""

        def free() -> int:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]

        before = free()
        decode, mixed = runner.add_graphs()
        mixed.capture(mixed.sizes[-1:])
        sizes = _sizes_at_start(decode)
        decode.capture(sizes[-1:])
        first = free()
        decode.capture(sizes[-2:])
        each = max(0, first - free())
        logits = runner.tables.max_num_seqs * runner.tables.vocab_size * self.model.dtype.itemsize
        return max(0, before - first) + each * (len(decode.sizes) + len(mixed.sizes)) + logits

    def _choose_kernels(self, dtype: torch.dtype) -> bool:
        """Finds the fastest products and compiles our own kernels; whether prompts' attention is one of those."""
        products = self.model.products()
        if self.groups is not None and self._quantization is None:
            products += warm_other_layouts(self)
        large_products.choose(products, self._most_tokens, dtype)
        return self._kv_dtype == dtype and hopper_attention.prepare(
            self.device, *self._head_sizes, dtype, self.config.block_size, large_products.folder()
        )

    @torch.inference_mode()
    def _warm_up_attention(self, dtype: torch.dtype) -> None:
        longest = min(self.max_model_len, self._most_tokens)
        vendor_attention.warm_up(*self._head_sizes, dtype, self.device, longest)
        torch.cuda.synchronize(self.device)

    @property
    def _head_sizes(self) -> tuple[int, int, int]:
        """This rank's query heads and KV heads, and the numbers of one."""
        shard = self.model.shard
        return shard.heads.size, shard.kv_heads.size, self.model.config.head_dim

    def _size_kv_cache(self, used: int) -> memory.KvCacheSize:
        """This rank's part of a cache of as many blocks as the rank with the least room can have."""
        per_block = self._block_bytes
        own = memory.size_kv_cache(
            self._available(per_block, used),
            per_block,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            num_blocks_override=self.config.num_gpu_blocks_override,
            least_tokens=1 if self._fit else None,
        )
        blocks = own.num_blocks if self.parallel is None else self.parallel.smallest(own.num_blocks)
        if self._fit and blocks * self.config.block_size < self.max_model_len:
            self.max_model_len = blocks * self.config.block_size
            log.warning("max_model_len auto: %d tokens fit, the model's own length does not", self.max_model_len)
        return memory.KvCacheSize(blocks, blocks * per_block)

    @property
    def _block_bytes(self) -> int:
        shard, head_dim = self.model.shard, self.model.config.head_dim
        size, element = self.config.block_size, self._kv_dtype.itemsize
        return memory.block_bytes(shard.num_layers, shard.kv_heads.size, head_dim, size, element)

    def _available(self, per_block: int, used: int) -> int:
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            reserve = memory.switch_reserve(total) if self.groups is not None else 0
            available = memory.available_on_gpu(total, used + reserve, self.config.gpu_memory_utilization)
            return available if self.most_kv_bytes is None else min(available, self.most_kv_bytes)
        longest = memory.blocks_for(self.max_model_len, self.config.block_size) * per_block
        return memory.available_on_cpu(
            memory.available_host_memory(), self._place.world, self.step_limits.max_num_seqs * longest
        )


def _sizes_at_start(graphs: DecodeGraphs) -> list[int]:
    return [size for size in graphs.sizes if size <= CAPTURED_AT_START]


def _device(wanted: str, rank: int) -> torch.device:
    cuda = torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise ValueError("device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if wanted == "cpu" or not cuda:
        if wanted == "auto" and rank == 0:
            # A person sees it in the line that says ready; a pod that was given a GPU has nobody who looks.
            level = logging.INFO if sys.stderr.isatty() else logging.WARNING
            log.log(level, "device auto: torch finds no CUDA device here; computing on the CPU")
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} needs CUDA device {rank}; there are {torch.cuda.device_count()}")
    return torch.device("cuda", rank)


def _check_load_format(load_format: str, files: ModelFiles) -> None:
    wrong = {"gguf": "folder", "safetensors": "gguf"}
    if wrong.get(load_format) == files.kind:
        raise ValueError(f"load_format {load_format} does not fit {files.path} (a {files.kind}); use auto")
