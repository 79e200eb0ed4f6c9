"""EngineConfig: one validated object. Flags, environment variables and the resource's
`engine.args` map to it one to one.

Each field is one flag: `max_model_len` is `--max-model-len`, KVERN_MAX_MODEL_LEN and `max-model-len` in `engine.args`.
`flags.py` builds the parser and the JSON list of flags from these fields; nothing is listed twice.
"""

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GROUPS = ("Model", "Server", "Limits", "Memory", "Scheduler", "Parallelism", "Execution", "Features")


def _flag(default: Any, help: str, group: str, **kw: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group, **kw.pop("extra", {})}, **kw)


# Fields that may be written with a suffix, as vLLM takes it: 32k is 32,000 and 32K is 32,768.
WITH_SUFFIX = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _with_suffix(text: str) -> int | str:
    """A number with a suffix; the text itself where it is none, for whoever reads it next."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([kmgtKMGT])", text.strip())
    if match is None or (match[2] in _BINARY and "." in match[1]):
        return text
    exact = Decimal(match[1]) * {**_DECIMAL, **_BINARY}[match[2]]
    return int(exact) if exact == int(exact) else text


class EngineConfig(BaseModel):
    """Everything that decides how an engine runs. Raises pydantic.ValidationError before anything is allocated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    model: str = _flag(..., "Folder, GGUF file, hf://org/name, s3://bucket/folder or builtin://smollm2-135m.", "Model")
    served_model_name: list[str] = _flag(
        [], "Names clients may use; the first one is reported. Default: the model's.", "Model"
    )
    tokenizer: str | None = _flag(None, "Folder or tokenizer.json to use instead of the model's own.", "Model")
    chat_template: str | None = _flag(
        None, "File with a Jinja chat template to use instead of the model's own.", "Model"
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = _flag(
        "auto",
        "Type of weights and activations; auto: bfloat16 on a GPU (float16 where it has none, float32 for models that "
        "overflow in that), float32 on a CPU. half is float16, float is float32.",
        "Model",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _flag(
        "auto",
        "How weights are stored; dummy: random weights of the model's shapes, no file of weights is read.",
        "Model",
    )
    max_model_len: Annotated[int, Field(ge=1)] | Literal["auto"] | None = _flag(
        None,
        "Longest prompt + output in tokens (8192, 8k, 8K). auto, or -1: the longest up to the model's that fits. "
        "Default: the model's.",
        "Model",
    )
    revision: str | None = _flag(None, "Branch, tag or commit of an hf:// model.", "Model")

    host: str = _flag("127.0.0.1", "Address to listen on.", "Server")
    port: int = _flag(8000, "Port of the OpenAI API; 0 takes a free one and prints it.", "Server", ge=0, le=65535)
    uds: str | None = _flag(None, "Listen on this unix socket instead of host and port.", "Server")
    admin_host: str = _flag("127.0.0.1", "Address of the admin port.", "Server")
    admin_port: int | None = _flag(
        None, "Port of /admin/*; off where not given; 0 takes a free one and prints it.", "Server", ge=0, le=65535
    )
    admin_token_file: str | None = _flag(None, "File with the bearer token of the admin port.", "Server")
    api_key: list[str] = _flag(
        [], "Bearer keys that clients must use (any of them). Also KVERN_API_KEYS, separated by commas.", "Server"
    )
    api_server_count: int = _flag(1, "API server processes in front of the engines.", "Server", ge=1, le=64)
    access_log: bool = _flag(
        True, "Log a line for each request: id, status, durations and token counts, never content.", "Server"
    )
    drain_timeout_seconds: float = _flag(
        300.0, "After SIGTERM, how long running requests may take to finish.", "Server", ge=0
    )
    shutdown_grace_seconds: float = _flag(
        0.0,
        "Above 0: no router is in front. After SIGTERM, accept for at least this long, until endpoints have noticed.",
        "Server",
        ge=0,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _flag("info", "Least severe level logged.", "Server")
    log_format: Literal["text", "json"] = _flag("text", "A log line as key=value words, or as a JSON object.", "Server")

    max_waiting_requests: int = _flag(
        4096, "Requests in flight at the server above which new ones get 429.", "Limits", ge=1
    )
    max_connections: int = _flag(
        16384, "Connections an API server holds; one more is answered 503 and closed.", "Limits", ge=1
    )
    max_header_bytes: int = _flag(
        65536, "Largest request line with headers in bytes; larger ones get 431.", "Limits", ge=1024
    )
    max_headers: int = _flag(256, "Most headers of a request; more get 431.", "Limits", ge=1)
    header_timeout_seconds: float = _flag(
        30.0, "Headers that have begun must arrive within this; later ones get 408.", "Limits", gt=0
    )
    max_body_bytes: int = _flag(16 << 20, "Largest request body in bytes; larger ones get 413.", "Limits", ge=1024)
    body_timeout_seconds: float = _flag(60.0, "A body must arrive within this; later ones get 408.", "Limits", gt=0)
    max_buffered_bytes: int = _flag(
        256 << 20, "Bytes of all bodies that an API server is reading; above them new ones get 503.", "Limits", ge=1024
    )
    keep_alive_seconds: float = _flag(75.0, "Idle connections are closed after this.", "Limits", gt=0)
    slow_client_seconds: float = _flag(
        60.0,
        "A client that takes too little of its answer for so long loses it, and its request is aborted.",
        "Limits",
        gt=0,
    )
    max_json_depth: int = _flag(64, "Deepest nesting of a body.", "Limits", ge=4, le=200)
    max_prompts_per_request: int = _flag(256, "Most prompts in one completions request.", "Limits", ge=1)
    max_prompt_tokens: int | None = _flag(
        None, "Most tokens of all prompts of a request. Default: max_model_len for each prompt.", "Limits", ge=1
    )
    max_n: int = _flag(128, "Most choices of a prompt (n).", "Limits", ge=1, le=128)
    max_stop: int = _flag(16, "Most stop strings of a request.", "Limits", ge=0, le=16)
    max_stop_chars: int = _flag(1024, "Longest stop string in characters.", "Limits", ge=1, le=1024)
    max_logprobs: int = _flag(20, "Most alternatives a token in logprobs and top_logprobs.", "Limits", ge=0, le=20)
    max_logit_bias: int = _flag(1024, "Most entries of logit_bias.", "Limits", ge=0, le=1024)
    max_messages: int = _flag(65536, "Most messages of a conversation.", "Limits", ge=1, le=65536)
    max_content_parts: int = _flag(65536, "Most content parts of all messages.", "Limits", ge=1, le=65536)
    max_tools: int = _flag(128, "Most tools of a request, and calls in one message.", "Limits", ge=0, le=1024)
    template_timeout_seconds: float = _flag(
        10.0, "Processor time a chat template may take for one conversation.", "Limits", gt=0
    )

    gpu_memory_utilization: float = _flag(0.92, "Share of the device's memory to use.", "Memory", gt=0, le=1)
    kv_cache_memory_bytes: int | None = _flag(
        None, "Bytes for the KV cache, instead of what gpu_memory_utilization leaves.", "Memory", ge=1
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = _flag(
        "auto",
        "Type of the KV cache; fp8 (E4M3) holds twice as many tokens. auto: the model's, fp8 where its checkpoint says "
        "so.",
        "Memory",
    )
    calculate_kv_scales: bool = _flag(
        False,
        "Find the scales of a KV cache in FP8 at start, by a fixed prompt, instead of the checkpoint's.",
        "Memory",
    )
    block_size: int = _flag(16, "Tokens a KV block holds.", "Memory", ge=1, le=256)
    cpu_offload_gb: float = _flag(
        0.0,
        "GiB of weights a GPU leaves in pinned host memory, from where they are copied for each use: for models "
        "that do not fit, at a price in speed.",
        "Memory",
        ge=0,
    )
    num_gpu_blocks_override: int | None = _flag(
        None, "Number of KV blocks, whatever memory says (for tests).", "Memory", ge=1
    )
    enable_prefix_caching: bool = _flag(True, "Reuse the KV of prompt prefixes seen before.", "Memory")

    max_num_seqs: int | None = _flag(
        None, "Most sequences in a step. Default: 256; 1024 on H100 and H200; 64 on a CPU.", "Scheduler", ge=1, le=4096
    )
    max_num_batched_tokens: int | None = _flag(
        None, "Most tokens in a step. Default: 8192; 2048 on a CPU.", "Scheduler", ge=1
    )
    enable_chunked_prefill: bool = _flag(True, "Compute long prompts in chunks beside running requests.", "Scheduler")
    long_prefill_token_threshold: int | None = _flag(
        None,
        "Most prompt tokens of one request in a step while others decode. Default: follows measured step times.",
        "Scheduler",
        ge=1,
    )
    scheduling_policy: Literal["fcfs", "priority"] = _flag("fcfs", "Order of the waiting queue.", "Scheduler")

    tensor_parallel_size: int = _flag(1, "Devices each layer is split over.", "Parallelism", ge=1)
    pipeline_parallel_size: int = _flag(1, "Stages the layers are split into.", "Parallelism", ge=1)
    data_parallel_size: int = _flag(1, "Engines behind this one port.", "Parallelism", ge=1)
    nnodes: int = _flag(1, "Pods that share the ranks; each is started with its own node_rank.", "Parallelism", ge=1)
    node_rank: int = _flag(0, "Which of the pods this is; 0 leads and serves HTTP.", "Parallelism", ge=0)
    master_addr: str | None = _flag(
        None, "DNS name or address of the leading pod, the same in all pods.", "Parallelism"
    )
    master_port: int = _flag(29501, "Port at which the leading pod meets the others.", "Parallelism", ge=1, le=65535)
    node_addr: str | None = _flag(
        None,
        "Address of this pod that the others reach it at. Default: that from which it reaches master_addr.",
        "Parallelism",
    )
    distributed_timeout_seconds: float = _flag(
        300.0, "How long ranks and pods wait for each other when they start.", "Parallelism", gt=0
    )
    disable_custom_all_reduce: bool = _flag(
        False, "Sum over GPUs through NCCL alone, not through each other's memory.", "Parallelism"
    )

    device: Literal["auto", "cuda", "cpu", "sim"] = _flag(
        "auto", "Where to compute; sim computes nothing and takes an H200's time.", "Execution"
    )
    sim_profile: str = _flag(
        "h200-llama3-8b", "Coefficients of --device sim: a shipped name or a JSON file.", "Execution"
    )
    sim_speed: float = _flag(1.0, "How many times faster than the profile the simulated device is.", "Execution", gt=0)
    distributed_executor_backend: Literal["auto", "uni", "mp"] = _flag(
        "auto", "uni: the worker runs in the core's process; mp: in its own.", "Execution"
    )
    async_scheduling: bool = _flag(True, "Plan the next step while the device computes this one.", "Execution")
    enforce_eager: bool = _flag(False, "Never use CUDA graphs.", "Execution")
    batch_invariant: bool = _flag(
        False,
        "Results do not depend on what else runs; on GPUs, FP8 weights aside, nor on whether there are 1 or 2 ranks.",
        "Execution",
    )
    seed: int = _flag(0, "Base of the seeds of requests that bring none.", "Execution")
    quantization: Literal["fp8", "fp8_per_tensor", "fp8_per_channel"] | None = _flag(
        None,
        "Quantize weights while loading, with one scale a matrix (fp8, fp8_per_tensor) or an output (fp8_per_channel).",
        "Execution",
    )
    record_step_plans: str | None = _flag(
        None, "Write every StepPlan to this file (for replays and bug reports).", "Execution"
    )

    trust_remote_code: bool = _flag(
        False,
        "Accepted, without effect: Kvern never runs code that a model brings, and says what there is.",
        "Features",
    )

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator(*WITH_SUFFIX, mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return _with_suffix(value) if isinstance(value, str) else value

    @field_validator("max_model_len", mode="before")
    @classmethod
    def _fitting(cls, value: Any) -> Any:
        return "auto" if value in (-1, "-1") and not isinstance(value, bool) else value

    @field_validator("dtype")
    @classmethod
    def _canonical_dtype(cls, value: str) -> str:
        return {"half": "float16", "float": "float32"}.get(value, value)

    @model_validator(mode="after")
    def _consistent(self) -> "EngineConfig":
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.admin_port is not None and not self.admin_token_file:
            raise ValueError("admin_port needs admin_token_file: the admin port is never open without a token")
        world = self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size
        if world > self.data_parallel_size and self.distributed_executor_backend == "uni":
            raise ValueError(
                "distributed_executor_backend=uni runs the worker in the core's process, which is for engines of one "
                "device; leave it at auto with tensor_parallel_size or pipeline_parallel_size above 1"
            )
        if self.batch_invariant and self.tensor_parallel_size > 2:
            raise ValueError(
                f"batch_invariant with tensor_parallel_size={self.tensor_parallel_size} cannot hold: the parts of more "
                "than two ranks are added up in an order that depends on where a token is in a step; use at most 2, or "
                "pipeline_parallel_size"
            )
        if self.calculate_kv_scales and self.pipeline_parallel_size > 1:
            raise ValueError("calculate_kv_scales with pipeline stages is not supported yet; use tensor_parallel_size")
        self._check_nodes(world)
        return self

    @property
    def asked_model_len(self) -> int | None:
        """`max_model_len` where it is a number; what it comes to otherwise is known once the model is loaded."""
        return None if self.max_model_len == "auto" else self.max_model_len

    def _check_nodes(self, world: int) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank must be within 0..{self.nnodes - 1} (nnodes {self.nnodes}), got {self.node_rank}"
            )
        if self.nnodes > 1 and not self.master_addr:
            raise ValueError(f"nnodes={self.nnodes} needs master_addr: the name or address of the pod with node_rank 0")
        if world % self.nnodes:
            raise ValueError(
                f"nnodes must divide the {world} ranks (data_parallel_size x pipeline_parallel_size x "
                f"tensor_parallel_size), got {self.nnodes}"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "uni":
            raise ValueError("distributed_executor_backend=uni is for one pod; leave it at auto with nnodes above 1")
