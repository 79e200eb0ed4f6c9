"""Flags that people bring from other engines and that Kvern does not have: what to use instead.

Data only. `flags.py` reads it where a flag or a value is not known.
"""

_NOT_YET = "is not offered yet"
_ARE_NOT_YET = "are not offered yet"
_SPECULATION = f"speculative decoding {_NOT_YET}; leave the flag out"
_LORA = f"LoRA adapters {_ARE_NOT_YET}; serve merged weights instead"
_TOOLS = f"tool calls {_ARE_NOT_YET}; leave the flag out"
_GRAPHS = "there is no compilation to configure: graph sizes are chosen at start; --enforce-eager turns graphs off"
_TLS = "TLS ends in front of the engine (ingress, gateway or sidecar); leave the flag out"
_CORS = "headers for browsers (CORS) are set in front of the engine (ingress or gateway); leave the flag out"
_LOGS = "requests are never logged and statistics are at /metrics; see --log-level"

REFUSED_FLAGS: dict[str, str] = {
    "swap-space": (
        "was removed: a preempted request is recomputed, nothing is swapped to the host. For more room for the KV "
        "cache use --kv-cache-memory-bytes or --gpu-memory-utilization"
    ),
    "preemption-mode": "was removed: a preempted request is always recomputed",
    "speculative-config": _SPECULATION,
    "speculative-model": _SPECULATION,
    "num-speculative-tokens": _SPECULATION,
    "enable-lora": _LORA,
    "lora-modules": _LORA,
    "max-loras": _LORA,
    "max-lora-rank": _LORA,
    "max-cpu-loras": _LORA,
    "enable-auto-tool-choice": _TOOLS,
    "tool-call-parser": _TOOLS,
    "tool-parser-plugin": _TOOLS,
    "reasoning-parser": f"reasoning parsers {_ARE_NOT_YET}; leave the flag out",
    "enable-expert-parallel": f"expert parallelism {_NOT_YET}; leave the flag out",
    "decode-context-parallel-size": f"context parallelism {_NOT_YET}; leave the flag out",
    "guided-decoding-backend": f"structured output {_NOT_YET}; leave the flag out",
    "structured-outputs-config": f"structured output {_NOT_YET}; leave the flag out",
    "limit-mm-per-prompt": f"image and audio inputs {_ARE_NOT_YET}; leave the flag out",
    "kv-transfer-config": f"disaggregated prefill {_NOT_YET}; leave the flag out",
    "kv-offloading-size": f"{_NOT_YET}; use --kv-cache-memory-bytes",
    "compilation-config": _GRAPHS,
    "cuda-graph-sizes": _GRAPHS,
    "max-seq-len-to-capture": _GRAPHS,
    "ssl-keyfile": _TLS,
    "ssl-certfile": _TLS,
    "ssl-ca-certs": _TLS,
    "allowed-origins": _CORS,
    "allowed-methods": _CORS,
    "allowed-headers": _CORS,
    "allow-credentials": _CORS,
    "disable-log-requests": _LOGS,
    "enable-log-requests": _LOGS,
    "disable-log-stats": _LOGS,
    "uvicorn-log-level": "use --log-level",
    "disable-uvicorn-access-log": "use --no-access-log",
    "log-config-file": "use --log-level and --log-format",
    "h11-max-incomplete-event-size": "use --max-header-bytes",
    "h11-max-header-count": "use --max-headers",
    "enable-request-id-headers": "every answer has X-Request-Id: the client's own, or a new one; leave the flag out",
    "max-log-len": _LOGS,
    "headless": "a pod with --node-rank above 0 serves no HTTP by itself; leave the flag out",
    "data-parallel-address": "use --master-addr",
    "data-parallel-rpc-port": "use --master-port",
    "root-path": "set the path where the proxy in front is configured",
    "download-dir": "set KVERN_CACHE_DIR to the folder that downloads go to",
    "hf-token": "set HF_TOKEN in the environment",
    "tokenizer-mode": "there is one tokenizer implementation; leave the flag out",
    "tokenizer-revision": "use --revision",
    "skip-tokenizer-init": "the Python API needs no tokenizer for token ids: SamplingParams(detokenize=False)",
    "num-scheduler-steps": "was removed: --async-scheduling overlaps scheduling with compute",
    "scheduler-delay-factor": "was removed: chunked prefill makes it unnecessary",
    "max-num-partial-prefills": "use --long-prefill-token-threshold and --max-num-batched-tokens",
    "max-long-partial-prefills": "use --long-prefill-token-threshold and --max-num-batched-tokens",
    "use-v2-block-manager": "was removed: there is one block manager",
    "worker-use-ray": "there is no Ray: --distributed-executor-backend is uni or mp",
    "prefix-caching-hash-algo": "prefix hashes are always SHA-256; leave the flag out",
    "task": f"only text generation is offered; embeddings {_ARE_NOT_YET}",
    "runner": f"only text generation is offered; embeddings {_ARE_NOT_YET}",
    "generation-config": "the model's generation_config.json gives the defaults; requests say what differs",
    "override-generation-config": "edit the model's generation_config.json, or say it in requests",
    "enable-prompt-tokens-details": "usage always says how many tokens came from the cache; leave the flag out",
    "hf-overrides": "edit the model's config.json instead",
    "rope-scaling": "edit rope_scaling in the model's config.json instead",
    "rope-theta": "edit rope_theta in the model's config.json instead",
    "max-concurrency": "use --max-num-seqs (in a step) and --max-waiting-requests (at the server)",
    "config": "a YAML file of flags is not read; use KVERN_* environment variables or `kvern up FILE`",
}

_METHODS = "awq", "gptq", "gptq_marlin", "awq_marlin", "bitsandbytes", "int8", "gguf", "modelopt"

# field -> value -> what to say about it, after the list of what is allowed.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "quantization": {
        **{method: f"{method} {_NOT_YET}" for method in _METHODS},
        "gguf": "a GGUF file is recognized by itself: leave the flag out",
        "compressed-tensors": "a checkpoint in FP8 is recognized by itself: leave the flag out",
    },
    "dtype": {"fp16": "use float16", "bf16": "use bfloat16"},
    "kv_cache_dtype": {"fp8_e5m2": "use fp8, which is E4M3", "bfloat16": "use auto: it is the model's type"},
    "load_format": {"pt": "convert the weights to safetensors", "hf": "use auto"},
    "distributed_executor_backend": {"ray": "there is no Ray: use mp"},
}

# Short spellings that are accepted.
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
}
