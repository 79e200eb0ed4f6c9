"""EngineConfig: one validated object. Flags, environment variables and the resource's
`engine.args` map to it one to one.

Each field is one flag: `max_model_len` is `--max-model-len`, KVERN_MAX_MODEL_LEN and `max-model-len` in `engine.args`.
`flags.py` builds the parser and the JSON list of flags from these fields; nothing is listed twice.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GROUPS = ("Model", "Server", "Memory", "Scheduler", "Parallelism", "Execution", "Features")


def _flag(default: Any, help: str, group: str, **kw: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group, **kw.pop("extra", {})}, **kw)


class EngineConfig(BaseModel):
    """Everything that decides how an engine runs. Raises pydantic.ValidationError before anything is allocated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    model: str = _flag(..., "Folder, GGUF file, hf://org/name or builtin://smollm2-135m.", "Model")
    served_model_name: list[str] = _flag(
        [], "Names clients may use; the first one is reported. Default: the model's.", "Model"
    )
    tokenizer: str | None = _flag(None, "Folder or tokenizer.json to use instead of the model's own.", "Model")
    chat_template: str | None = _flag(
        None, "File with a Jinja chat template to use instead of the model's own.", "Model"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = _flag(
        "auto",
        "Type of weights and activations; auto: bfloat16 on a GPU (float16 where it has none), float32 on a CPU.",
        "Model",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _flag(
        "auto", "How weights are stored; dummy: random weights.", "Model"
    )
    max_model_len: int | None = _flag(None, "Longest prompt + output in tokens. Default: the model's.", "Model", ge=1)
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
    max_waiting_requests: int = _flag(
        4096, "Requests in flight at the server above which new ones get 429.", "Server", ge=1
    )
    max_body_bytes: int = _flag(16 << 20, "Largest request body in bytes.", "Server", ge=1024)
    max_prompts_per_request: int = _flag(256, "Most prompts in one completions request.", "Server", ge=1)
    drain_timeout_seconds: float = _flag(
        300.0, "After SIGTERM, how long running requests may take to finish.", "Server", ge=0
    )
    shutdown_grace_seconds: float = _flag(
        0.0, "After SIGTERM, go on accepting for this long (until endpoints have noticed).", "Server", ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _flag("info", "Least severe level logged.", "Server")

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
    block_size: int = _flag(16, "Tokens a KV block holds.", "Memory", ge=1, le=256)
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
    batch_invariant: bool = _flag(False, "Results of a request do not depend on what runs beside it.", "Execution")
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
        False, "Run code that a model brings. Kvern never does: true is refused.", "Features"
    )

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "EngineConfig":
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.trust_remote_code:
            raise ValueError("trust_remote_code=True: Kvern never runs code that a model brings; remove the flag")
        if self.admin_port is not None and not self.admin_token_file:
            raise ValueError("admin_port needs admin_token_file: the admin port is never open without a token")
        world = self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size
        if world > self.data_parallel_size and self.distributed_executor_backend == "uni":
            raise ValueError(
                "distributed_executor_backend=uni runs the worker in the core's process, which is for engines of one "
                "device; leave it at auto with tensor_parallel_size or pipeline_parallel_size above 1"
            )
        self._check_nodes(world)
        return self

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
