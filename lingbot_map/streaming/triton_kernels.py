"""
Triton kernels for attention over cached keys, with all positions read on the device.

Python numbers are constant in a captured CUDA graph. These kernels read rows and lengths from a
small tensor, the cursor, so that one graph serves all frames. Needs Triton, which is installed
with torch for CUDA.
"""

import torch
from torch import Tensor
import triton
import triton.language as tl

# Entries of the cursor, an int64 tensor (7,): number of frames kept before; first row for the
# special tokens; first row for the patch tokens; two ranges [start, end) of rows to attend to.
INDEX, SPECIAL_ROW, PATCH_ROW, RANGES = 0, 1, 2, 3
CURSOR_SIZE = 7
_LOG2_E = tl.constexpr(1.4426950408889634)
_CAMERA_SPLITS = 16  # programs per head in camera attention, which has only one query


@triton.jit
def _store_kernel(
    k, v, keys, values, cursor, tokens, specials, k_head, k_row, v_head, v_row, cache_head,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    target = tl.where(
        row < specials, tl.load(cursor + 1) + row, tl.load(cursor + 2) + row - specials
    )
    mask = row < tokens
    there = head * cache_head + target * HEAD_DIM + dim
    tl.store(keys + there, tl.load(k + head * k_head + row * k_row + dim, mask), mask)
    tl.store(values + there, tl.load(v + head * v_head + row * v_row + dim, mask), mask)


@triton.jit
def _attend_block(
    q, keys, values, col, end, m, total, acc, scale, HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """
    Add BLOCK_N keys from row `col` on to the running softmax (m, total, acc).

    m is the maximum of q * k; `scale` converts q * k to exponents of base 2.
    """
    row = col + tl.arange(0, BLOCK_N)
    there = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if MASKED:
        mask = row[:, None] < end
        k = tl.load(keys + there, mask, other=0.0)
        v = tl.load(values + there, mask, other=0.0)
    else:
        k = tl.load(keys + there)
        v = tl.load(values + there)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        s = tl.where(row[None, :] < end, s, float('-inf'))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s * scale - (m_new * scale)[:, None])
    shrink = tl.exp2((m - m_new) * scale)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def _attend_kernel(
    q, keys, values, out, prior, prior_lse, ranges, queries, q_head, q_row, cache_head,
    out_head, out_row, prior_head, prior_row, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_PRIOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)
    mask = row[:, None] < queries
    tile = tl.load(q + head * q_head + row[:, None] * q_row + dim[None, :], mask, other=0.0)
    if HAS_PRIOR:
        m = tl.load(prior_lse + head * queries + row, row < queries, other=0.0) * (_LOG2_E / scale)
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
        there = head * prior_head + row[:, None] * prior_row + dim[None, :]
        acc = tl.load(prior + there, mask, other=0.0).to(tl.float32)
    else:
        m = tl.full((BLOCK_M,), float('-inf'), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    keys += head * cache_head
    values += head * cache_head
    for part in tl.static_range(2):
        start = tl.load(ranges + 2 * part).to(tl.int32)
        end = tl.load(ranges + 2 * part + 1).to(tl.int32)
        whole = start + (end - start) // BLOCK_N * BLOCK_N
        for col in range(start, whole, BLOCK_N):
            m, total, acc = _attend_block(
                tile, keys, values, col, end, m, total, acc, scale,
                HEAD_DIM, PRECISION, False, BLOCK_N)  # fmt: skip
        if whole < end:
            m, total, acc = _attend_block(
                tile, keys, values, whole, end, m, total, acc, scale,
                HEAD_DIM, PRECISION, True, BLOCK_N)  # fmt: skip
    there = head * out_head + row[:, None] * out_row + dim[None, :]
    tl.store(out + there, (acc / total[:, None]).to(out.dtype.element_ty), mask)


@triton.jit
def _attend_camera_kernel(
    q, k, v, keys, values, parts, cursor, q_head, k_head, v_head, cache_head, scale,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store one token per head; write the softmax state (m, total, acc) of a part of the rows."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, HEAD_DIM)
    index = tl.load(cursor).to(tl.int32)
    query = tl.load(q + head * q_head + dim).to(tl.float32) * scale
    key, value = tl.load(k + head * k_head + dim), tl.load(v + head * v_head + dim)
    keys += head * cache_head
    values += head * cache_head
    # Each part starts from the frame's own key in registers, so no program reads the row that is
    # being written; only part 0 counts it.
    m = tl.sum(query * key.to(tl.float32), 0)
    total = tl.where(split == 0, 1.0, 0.0)
    acc = value.to(tl.float32) * total
    if split == 0:
        tl.store(keys + index * HEAD_DIM + dim, key)
        tl.store(values + index * HEAD_DIM + dim, value)
    for col in range(split * BLOCK_N, index, SPLITS * BLOCK_N):
        row = col + tl.arange(0, BLOCK_N)
        there = row[:, None] * HEAD_DIM + dim[None, :]
        mask = row[:, None] < index
        s = tl.sum(tl.load(keys + there, mask, other=0.0).to(tl.float32) * query[None, :], 1)
        s = tl.where(row < index, s, float('-inf'))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2(s - m_new)
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(p, 0)
        block = tl.load(values + there, mask, other=0.0).to(tl.float32)
        acc = acc * shrink + tl.sum(p[:, None] * block, 0)
        m = m_new
    parts += (head * SPLITS + split) * (HEAD_DIM + 2)
    tl.store(parts, m)
    tl.store(parts + 1, total)
    tl.store(parts + 2 + dim, acc)


@triton.jit
def _merge_camera_kernel(parts, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0)
    dim = tl.arange(0, HEAD_DIM)
    part = parts + (head * SPLITS + tl.arange(0, SPLITS)) * (HEAD_DIM + 2)
    m = tl.load(part)
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * tl.load(part + 1), 0)
    acc = tl.sum(weight[:, None] * tl.load(part[:, None] + 2 + dim[None, :]), 0)
    tl.store(out + head * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty))


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cursor: Tensor, specials: int):
    """
    Write the tokens k and v (1, heads, N, head_dim) of one frame to the rows in `cursor`.

    `keys` and `values` (1, heads, rows, head_dim) are the caches; the first `specials` tokens of
    the frame are special tokens.
    """
    _, heads, tokens, head_dim = k.shape
    _store_kernel[triton.cdiv(tokens, 64), heads](
        k, v, keys, values, cursor, tokens, specials, k.stride(1), k.stride(2), v.stride(1),
        v.stride(2), keys.stride(1), HEAD_DIM=head_dim, BLOCK=64,
    )  # fmt: skip


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ranges: Tensor,
    prior: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """
    Attend from queries (1, heads, N, head_dim) to the cached rows in two ranges (4,) int64.

    `prior` is attention over other rows and its log-sum-exp (1, heads, N); the result is exact
    over all rows. Returns (1, heads, N, head_dim), stored as (1, N, heads, head_dim).
    """
    _, heads, queries, head_dim = q.shape
    out = q.new_empty(1, queries, heads, head_dim).transpose(1, 2)
    seen, lse = (q, q) if prior is None else prior
    whole = q.dtype == torch.float32
    block_m, block_n = (32, 32) if whole else (64, 128)
    _attend_kernel[triton.cdiv(queries, block_m), heads](
        q, keys, values, out, seen, lse, ranges, queries, q.stride(1), q.stride(2),
        keys.stride(1), out.stride(1), out.stride(2), seen.stride(1), seen.stride(2),
        head_dim**-0.5 * _LOG2_E.value, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n,
        HAS_PRIOR=prior is not None, PRECISION='ieee' if whole else 'tf32',
        num_warps=4, num_stages=2 if whole else 3,
    )  # fmt: skip
    return out


def attend_camera(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cursor: Tensor
) -> Tensor:
    """
    Store the camera token of a frame at row `cursor[INDEX]`; attend to this and earlier rows.

    `q`, `k`, `v` (1, heads, 1, head_dim); `keys`, `values` (1, heads, rows, head_dim).
    """
    _, heads, _, head_dim = q.shape
    out = q.new_empty(q.shape)
    parts = torch.empty(heads, _CAMERA_SPLITS, head_dim + 2, device=q.device)
    _attend_camera_kernel[heads, _CAMERA_SPLITS](
        q, k, v, keys, values, parts, cursor, q.stride(1), k.stride(1), v.stride(1),
        keys.stride(1), head_dim**-0.5 * _LOG2_E.value, HEAD_DIM=head_dim, BLOCK_N=32,
        SPLITS=_CAMERA_SPLITS,
    )  # fmt: skip
    _merge_camera_kernel[(heads,)](parts, out, HEAD_DIM=head_dim, SPLITS=_CAMERA_SPLITS)
    return out
