"""Paged attention on a CPU, for speed: what a step needs is planned once and run by every layer.

Ideas: a run of consecutive block ids is a view of the arena, so nothing is copied; other contexts are gathered in
pieces that stay in the cache; decode rows of similar length share one call; the query heads of a KV head are folded
into the query dimension (GQA), K and V are never repeated; rows that share a prefix of blocks attend to it once, and
the parts are merged by their log-sum-exp (Juravsky et al., Hydragen, arXiv 2402.05099).
"""

from .attention import paged_attention

__all__ = ["paged_attention"]
