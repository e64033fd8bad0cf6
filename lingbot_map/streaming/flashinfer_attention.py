"""Attention over cached keys by FlashInfer's kernels: the extra `flashinfer`."""

from torch import Tensor


def attend_prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let queries (1, heads, N, head_dim), bf16 or fp16, see keys (1, heads, M, head_dim)."""
    import flashinfer

    # The visible rows of a StreamMemory are one slice, so no table of pages has to be planned.
    # As views in layout NHD: with HND, kernels of 0.6.0 for sm90 take the heads for the length.
    out = flashinfer.single_prefill_with_kv_cache(*(x[0].transpose(0, 1) for x in (q, k, v)))
    return out.transpose(0, 1)[None]
