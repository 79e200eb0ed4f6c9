"""Attention with the projections around it, as most families have it; what a family lacks, its configuration says."""

import torch
from torch import Tensor

from kvern_engine.layers.attention import Attention, Wanted
from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.norm import RMSNorm
from kvern_engine.layers.parameters import Destinations, split_by_inputs, split_by_outputs, whole
from kvern_engine.parallel.groups import OwnShare
from kvern_kernels import AttentionMetadata, ScaledRows


class SelfAttention:
    """`qkv_proj` holds the rows of q, k and v in this order, of this rank's heads. Biases, windows, soft caps and norms
    of the heads (of class `norm_class`) are there where the configuration has them."""

    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, build: Build, layer: int) -> None:
        config, shard, group = build.config, build.shard, build.group
        self._config, self._group = config, group
        self._in_parts, self._sums_in_norm = build.in_parts, build.sums_in_norm
        self._q, self._kv = shard.heads.times(config.head_dim), shard.kv_heads.times(config.head_dim)
        hidden, fp8 = config.hidden_size, config.fp8 is not None
        self.qkv_proj = Linear(
            hidden,
            self._q.size + 2 * self._kv.size,
            bias=config.attention_bias,
            dtype=build.dtype,
            device=build.device,
            fp8=fp8,
            pieces=build.output_pieces,
        )
        self.o_proj = Linear(
            self._q.size,
            hidden,
            bias=config.attention_out_bias and group.rank == 0,
            dtype=build.dtype,
            device=build.device,
            fp8=fp8,
            pieces=build.pieces,
        )
        self._kv_scale = torch.ones(2, dtype=torch.float32, device=build.device)  # of K and V, from the checkpoint
        self.attention = Attention(
            shard.heads.size,
            shard.kv_heads.size,
            config.head_dim,
            build.dtype,
            scale=config.attention_scale,
            window=build.window(layer),
            softcap=config.attention_softcap,
        )
        self.norms: dict[str, RMSNorm] = {}
        if config.qk_norm:
            size, eps = config.head_dim, config.rms_norm_eps
            for name in ("q_norm", "k_norm"):
                self.norms[name] = self.norm_class(size, eps, dtype=build.dtype, device=build.device)
                setattr(self.attention, name, self.norms[name].weight)
            self.attention.norm_eps = config.rms_norm_eps

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """What the heads give, [T, Hq * D]: before `output`."""
        return self.attention(self.qkv_proj.parts(x), positions, cos_sin, kv, meta, wanted)

    def output(self, heads: Tensor, residual: Tensor) -> Tensor | OwnShare | None:
        """The output projection, for the norm that adds it to `residual`; None: it has been added."""
        if self._in_parts:
            return self.o_proj.before_norm(heads, residual)
        if self._sums_in_norm:
            return OwnShare(self.o_proj.parts(heads), self._group)
        return self.project(heads)

    def project(self, heads: Tensor) -> Tensor:
        """The output projection, [T, H], whoever reads it."""
        return self._group.all_reduce(self.o_proj(heads))

    def fp8(
        self,
        x: ScaledRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> ScaledRows:
        qkv = self.qkv_proj.scaled_parts(x)
        rows = x.values.shape[0] if wanted is None else wanted.index.shape[0]
        by_blocks = self.o_proj.takes_blocks(rows, self._group)
        heads = self.attention.fp8(qkv, positions, cos_sin, kv, meta, wanted, by_blocks)
        return self.o_proj.scaled_sum(heads, self._group)

    @property
    def capturable(self) -> bool:
        """A CUDA graph can record it: its GPU kernels have neither windows nor soft caps (`kvern_kernels`)."""
        return self.attention.window is None and self.attention.softcap is None

    def destinations(self, prefix: str) -> Destinations:
        """`prefix` is that of the attention's tensors, e.g. "model.layers.0.self_attn."."""
        head_dim, rows = self._config.head_dim, self._config.fp8 is not None and self._config.fp8.per_channel
        q, kv = self._config.num_heads * head_dim, self._config.num_kv_heads * head_dim
        merged = [("q_proj", self._q, q), ("k_proj", self._kv, kv), ("v_proj", self._kv, kv)]
        found = split_by_outputs(prefix, self.qkv_proj, merged, rows)
        found |= split_by_inputs(prefix, self.o_proj, "o_proj", self._q, q, rows)
        for name, norm in self.norms.items():
            found |= norm.destinations(f"{prefix}{name}")
        if self._config.fp8 is not None and self._config.fp8.kv_scales:
            found |= {f"{prefix}{name}_scale": whole(self._kv_scale[i]) for i, name in enumerate("kv")}
        return found

    def set_kv_scale(self, scale: Tensor) -> None:
        """Of K and V, [2] float32, in place of the checkpoint's."""
        self._kv_scale.copy_(scale)

    def use_fp8_kv(self) -> None:
        """After loading: K and V are written to a cache in FP8, all heads by the layer's scales."""
        self.attention.kv_scales = self._kv_scale[:, None].expand(2, self.attention.num_kv_heads).contiguous()
