"""What all families share: embedding, a stack of layers, a last norm and the LM head, on one rank or as its part of a
layout; loading, and the forms in which weights are kept. A family (`llama.py` and its neighbours) says what a layer
computes and what its tensors are called.

Tensors are plain attributes, not modules: at batch 1 on a GPU or a small model on a CPU, the time between kernels
counts.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.build import Build
from kvern_engine.layers.embedding import Embedding
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.norm import LayerNorm, RMSNorm
from kvern_engine.layers.parameters import Destination, Destinations, clear_padding, vocabulary_rows
from kvern_engine.layers.rotary import rope_table
from kvern_engine.layers.self_attention import SelfAttention
from kvern_engine.loading.parts import WeightPart
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.groups import OwnShare, ParallelContext
from kvern_kernels import AttentionMetadata, Fp8Weight, quantize_rows, restore_rows


class DecoderLayer(Protocol):
    """A layer of a family."""

    def __init__(self, build: Build, index: int) -> None: ...

    @property
    def attention(self) -> SelfAttention: ...

    @property
    def capturable(self) -> bool:
        """It reads nothing back from the device, so that a CUDA graph can record it."""
        ...

    def __call__(
        self,
        x: Tensor | OwnShare | None,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor | OwnShare | None, Tensor]:
        """`x` [T, H], maybe in parts or this rank's share: what the layer before computed and has not yet added to
        `residual` [T, H] (None: nothing).

        Of the tokens that are not `wanted` only K and V are computed; the results are then [S, H]."""
        ...

    def linears(self) -> list[Linear]:
        """All large matrices, from the input on."""
        ...

    def destinations(self, prefix: str) -> Destinations: ...


class DecoderLM:
    """The model, or the part of it that this rank of `parallel` holds (`shard`). `max_positions` is the longest
    sequence it will see. `host_layers` are built in the host's memory (`worker/offload.py`). `invariant`: see `Build`.
    Raises ValueError where the layout does not fit the model, or for a constant it does not know.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    norm_class: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm
    quantizable: ClassVar[bool] = False  # `quantize_fp8` can be called, checkpoints may come in FP8
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    layer_prefix: ClassVar[str] = "model.layers."
    norm_name: ClassVar[str] = "model.norm"
    head_name: ClassVar[str] = "lm_head.weight"

    embed_tokens: Embedding | None = None  # of the first stage
    norm: RMSNorm | LayerNorm | None = None  # of the last stage, as is the head
    lm_head: Linear | None = None
    layers: Sequence[DecoderLayer]

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext | None = None,
        host_layers: Collection[int] = (),
        invariant: bool = False,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.make_tables(max_positions)  # first: it refuses what it does not know before memory is taken
        parallel = parallel or ParallelContext.single()
        self._group = group = parallel.tensor
        self.shard = shard = parallel.shard(config)
        # On a CPU the tiles of `worker/invariant.py` are enough for one size, and nothing is promised for another.
        invariant = invariant and device.type == "cuda"
        self.build = build = Build(config, shard, group, dtype, device, max_positions, invariant)
        hidden = config.hidden_size
        if shard.is_first:
            self.embed_tokens = Embedding(shard.vocab, hidden, group, dtype=dtype, device=device)
        host = build.on(torch.device("cpu"))
        self.layers = [self.layer_class(host if i in host_layers else build, i) for i in shard.layers]
        if shard.is_last:
            self.norm = self.norm_class(hidden, config.rms_norm_eps, dtype=dtype, device=device)
            if config.tie_word_embeddings and self.embed_tokens is not None:
                self.lm_head = Linear.sharing(self.embed_tokens.weight, build.output_pieces)
            else:
                fp8 = config.fp8 is not None and config.fp8.head
                pieces = build.output_pieces
                self.lm_head = Linear(hidden, shard.vocab.size, dtype=dtype, device=device, fp8=fp8, pieces=pieces)
                clear_padding(self.lm_head, shard.vocab)

    # ------------------------------------------------------------ what a family may compute in another way

    def make_tables(self, max_positions: int) -> None:
        """The rotary tables, one for all layers or one for those with a window too."""
        self.cos_sin = rope_table(self.config, max_positions, self.device)
        self.local_cos_sin = self.cos_sin
        if self.config.local_rope_theta is not None:
            self.local_cos_sin = rope_table(self.config, max_positions, self.device, local=True)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The residual stream before the first layer, [T, H]."""
        assert self.embed_tokens is not None, "a later stage takes the residual stream"
        return self.embed_tokens(token_ids)

    # ------------------------------------------------------------ running

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [T, hidden_size], or [S, hidden_size] of the S tokens that are `wanted`.

        A stage but the last gives the residual stream of all tokens, which the next one takes as `residual` (None on
        the first one; it may be overwritten).

        `token_ids` [T] int32, `positions` [T] int64, `kv_caches` one [2, Hkv, N, bs, D] a layer of this stage: K and V
        of the tokens are written to it at `meta.slots`.
        """
        if residual is None:
            residual = self.embed(token_ids, positions)
        x: Tensor | OwnShare | None = None
        last = self.layers[-1] if self.norm is not None else None
        for layer, cos_sin, kv in zip(self.layers, self.tables(), kv_caches, strict=True):
            only = wanted if layer is last else None
            x, residual = layer(x, residual, positions, cos_sin, kv, meta, only)
        if self.norm is None:
            assert not isinstance(x, OwnShare), "only the last stage has a norm to sum in"
            return residual if x is None else x + residual
        return self.norm.add(x, residual)[0]

    def tables(self) -> list[Tensor]:
        """The rotary table of each layer."""
        if self.local_cos_sin is self.cos_sin:
            return [self.cos_sin] * len(self.layers)
        windows = [self.config.window(index) is not None for index in self.shard.layers]
        return [self.local_cos_sin if local else self.cos_sin for local in windows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, hidden_size] -> [R, vocab_size] in the model's dtype, the same on every rank of the last
        stage."""
        assert self.lm_head is not None, "logits are the last stage's"
        if self.lm_head.is_fp8:
            own = restore_rows(self.lm_head.scaled(quantize_rows(hidden)), self.dtype)
        else:
            own = self.lm_head(hidden)
        logits = self._group.all_gather(own)
        vocab_size, cap = self.config.vocab_size, self.config.logit_softcap
        logits = logits if logits.shape[1] == vocab_size else logits[:, :vocab_size].contiguous()
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def capturable(self) -> bool:
        """A step of the model reads nothing back from the device: a CUDA graph can record it."""
        return all(layer.capturable for layer in self.layers)

    # ------------------------------------------------------------ loading

    def destinations(self) -> Destinations:
        """Checkpoint name -> the part of a parameter that it is copied to (views; all parameters are covered)."""
        config, shard = self.config, self.shard
        found: Destinations = {}
        if self.embed_tokens is not None:
            found[self.embedding_name] = vocabulary_rows(self.embed_tokens.weight, shard.vocab, config.vocab_size)
        for index, layer in zip(shard.layers, self.layers, strict=True):
            found |= layer.destinations(f"{self.layer_prefix}{index}.")
        if self.norm is not None:
            found |= self.norm.destinations(self.norm_name)
        if self.lm_head is not None and not (config.tie_word_embeddings and self.embed_tokens is not None):
            name = self.embedding_name if config.tie_word_embeddings else self.head_name
            found[name] = vocabulary_rows(self.lm_head.weight, shard.vocab, config.vocab_size)
            if self.lm_head.scales is not None:
                held, rows = shard.vocab, config.fp8 is not None and config.fp8.per_channel
                part = WeightPart((config.vocab_size,), ((held.start, held.stop),)) if rows else WeightPart.whole()
                found["lm_head.weight_scale"] = Destination(self.lm_head.scales[: held.count], part)
        return found

    def products(self) -> list[Tensor | Fp8Weight]:
        """After loading: the weights of one layer, whose shapes are those of all."""
        return [linear.stored for linear in self.layers[0].linears()]

    def set_kv_scales(self, scales: Tensor) -> None:
        """What `use_fp8_kv` divides K and V of each layer by, [layers, 2] float32, in place of the checkpoint's."""
        for layer, own in zip(self.layers, scales, strict=True):
            layer.attention.set_kv_scale(own)

    def use_fp8_kv(self) -> None:
        """After loading: the KV caches are in FP8, scaled as the checkpoint or `set_kv_scales` says, or by 1."""
        for layer in self.layers:
            layer.attention.use_fp8_kv()

    def quantize_fp8(self, per_channel: bool = False) -> int:
        """After loading, in families that are `quantizable`: see `LlamaForCausalLM`."""
        raise ValueError(f"{self.config.architecture} cannot be quantized to FP8 yet; leave quantization out")

    def add_cpu_layouts(self) -> None:
        """After loading, on a CPU: keep the weights as they multiply fastest, at the price of memory (`Linear`)."""
        for layer in self.layers:
            for linear in layer.linears():
                linear.add_cpu_layouts()
        if self.lm_head is not None:
            self.lm_head.add_cpu_layouts()
