"""
Attention of a single frame over a StreamMemory, for the backends other than `sdpa`.

`RingAttention` (backends `cudnn`, `flash`, `triton`) runs a constant number of kernels and can be
captured in a CUDA graph. Most keys are in rows that are the same for many frames: the filled slots
of the ring and the oldest special tokens next to them. A library kernel (`cudnn`, `flash`) attends
to these rows; a Triton kernel continues its softmax exactly over the remaining rows, whose bounds
it reads on the device. With `triton` the second kernel attends to all rows.

`attend_prefill` is the backend `flashinfer`; it cannot be captured.
"""

from lingbot_map.models.memory import StreamMemory
from lingbot_map.streaming import triton_kernels
import torch
from torch import Tensor

# While the ring fills, the rows of the library kernel grow by this many slots at a time.
_SLOT_STEP = 8
# Library kernels are 10 % faster if the number of rows is a multiple of this.
_TILE_ROWS = 128


class RingAttention:
    """
    Replaces `attend`, `attend_camera` and `index` of a memory, for single frames.

    Call `update` after `memory.write` and before the forward pass. `fixed` is the slice of rows
    that is constant in a CUDA graph; frames with the same `fixed` can share a graph.
    """

    def __init__(self, memory: StreamMemory, backend: str):
        self.memory, self.backend = memory, backend
        self.cursor = torch.zeros(
            triton_kernels.CURSOR_SIZE, dtype=torch.int64, device=memory.device
        )
        self.fixed = self._fixed_rows(0)

    @property
    def index(self) -> Tensor:
        """Temporal position (1,) of the frame being written."""
        return self.cursor[: triton_kernels.INDEX + 1]

    def update(self) -> None:
        """Copy to the device where the frame is written and which rows are visible."""
        visible = self.memory.visible_rows
        self.fixed = self._fixed_rows(self.memory.visible_slots)
        self._set_cursor(visible.start, visible.stop)

    def all_fixed(self) -> list[slice]:
        """Return all possible values of `fixed`, longest first."""
        shape = self.memory.shape
        slots = range(min(shape.anchors + shape.window, shape.max_keyframes + 1) + 1)
        rows = {(s.start, s.stop) for s in map(self._fixed_rows, slots)}
        return [slice(*pair) for pair in sorted(rows, key=lambda pair: -pair[1])]

    def prepare_capture(self, fixed: slice) -> None:
        """Set up a pass for the capture of `fixed`; its outputs are not used."""
        self.fixed = fixed
        self._set_cursor(fixed.start - self.memory.shape.specials, fixed.stop)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values (1, heads, P, head_dim); attend to all visible rows."""
        memory = self.memory
        keys, values = memory.keys[layer], memory.values[layer]
        triton_kernels.store(k, v, keys, values, self.cursor, memory.shape.specials)
        prior = None
        if self.fixed.start < self.fixed.stop:
            prior = attend_with_lse(
                q, keys[:, :, self.fixed], values[:, :, self.fixed], self.backend
            )
        ranges = self.cursor[triton_kernels.RANGES :]
        return triton_kernels.attend(q, keys, values, ranges, prior)

    def attend_camera(self, iteration: int, depth: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store camera keys and values (1, heads, 1, head_dim); attend to all kept frames."""
        memory = self.memory
        keys, values = memory.camera_keys[iteration, depth], memory.camera_values[iteration, depth]
        return triton_kernels.attend_camera(q, k, v, keys, values, self.cursor)

    def _fixed_rows(self, visible_slots: int) -> slice:
        shape = self.memory.shape
        ring = shape.anchors + shape.window
        slots = ring if visible_slots >= ring else visible_slots // _SLOT_STEP * _SLOT_STEP
        if self.backend == 'triton':
            slots = 0
        patches = slots * shape.patches
        to_tile = -patches % _TILE_ROWS
        # These special rows are in use by then: the frame of each slot has written its own.
        specials = to_tile if to_tile <= slots * shape.specials else 0
        return slice(shape.special_rows - specials, shape.special_rows + patches)

    def _set_cursor(self, first: int, last: int) -> None:
        memory, fixed = self.memory, self.fixed
        values = (memory.kept, *memory.written_rows, first, fixed.start, fixed.stop, last)
        self.cursor.copy_(torch.tensor(values))


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return attention (1, heads, N, head_dim) and its natural log-sum-exp (1, heads, N)."""
    if backend == 'cudnn':
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse


def attend_prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from queries (1, heads, N, head_dim), bf16 or fp16, to M keys, with FlashInfer."""
    import flashinfer

    # The visible rows of a StreamMemory are one slice, so no page table is needed.
    # Pass views in layout NHD: with HND, the sm90 kernels of 0.6.0 swap heads and length.
    out = flashinfer.single_prefill_with_kv_cache(*(x[0].transpose(0, 1) for x in (q, k, v)))
    return out.transpose(0, 1)[None]
