"""
StreamMemory: cached keys and values of a sequence, allocated once (spec sections 8 and 9).

The key buffer of each trunk layer has these rows:

    special tokens, newest first   |   frame slots 0 .. anchors + window - 1   |   scratch slot
    row: special_rows - 6 (n + 1)  |   special_rows + slot * patches

The keys that a frame attends to are always one contiguous slice, so attention needs no mask, copy
or shift: the keys already contain their rotary positions, and softmax ignores their order.
"""

from dataclasses import dataclass
import math

from lingbot_map.layers.attention import attend_fully
import torch
from torch import Tensor


class StreamLimitError(RuntimeError):
    """The memory is full: it holds `max_keyframes` frames."""


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of a memory; `patches` and `specials` count tokens per frame."""

    layers: int
    heads: int
    head_dim: int
    patches: int
    specials: int
    anchors: int  # first kept frames; their patches are never evicted
    window: int  # newest kept frames after the anchors whose patches are cached
    max_keyframes: int  # capacity, in frames kept since a reset
    camera_iterations: int
    camera_depth: int
    camera_heads: int
    camera_head_dim: int

    @property
    def resident(self) -> int:
        """Frames whose patches fit at once, without the scratch slot."""
        return min(self.anchors + self.window, self.max_keyframes)

    @property
    def special_rows(self) -> int:
        return self.specials * (self.max_keyframes + 1)

    @property
    def rows(self) -> int:
        return self.special_rows + self.patches * (self.resident + 1)

    @property
    def trunk_buffer(self) -> tuple[int, ...]:
        """Shape of the trunk's key buffer and of its value buffer."""
        return (self.layers, 1, self.heads, self.rows, self.head_dim)

    @property
    def camera_buffer(self) -> tuple[int, ...]:
        """Shape of the camera head's key buffer and of its value buffer."""
        depth, frames = max(self.camera_depth, 1), self.max_keyframes + 1
        return (self.camera_iterations, depth, 1, self.camera_heads, frames, self.camera_head_dim)


class StreamMemory:
    """Cached keys and values of one sequence. Per frame: write, forward, commit or undo."""

    def __init__(self, shape: MemoryShape, device: torch.device, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.keys, self.values = _buffers(shape.trunk_buffer, device, dtype)
        self.camera_keys, self.camera_values = _buffers(shape.camera_buffer, device, torch.float32)
        self.attend_cached = attend_fully  # attention function for single frames
        self.slot_frames = [-1] * (shape.resident + 1)  # number of the kept frame in each slot
        self.reset()

    def reset(self) -> None:
        """Forget all frames; keep the buffers."""
        self.kept = 0
        self._frames = 0
        self.visible_slots = 0  # number of slots that the frame being written attends to
        self._in_scratch = False

    @property
    def nbytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(
            t.nbytes for t in (self.keys, self.values, self.camera_keys, self.camera_values)
        )

    @property
    def index(self) -> Tensor:
        """Temporal positions (S,) of the frames being written."""
        return torch.arange(self.kept, self.kept + self._frames, device=self.device)

    @property
    def visible_patches(self) -> list[int]:
        """Numbers of the kept frames whose patch keys are visible to the frames being written."""
        if self._frames > 1:
            return list(range(self.kept, self.kept + self._frames))
        return sorted(self.slot_frames[: self.visible_slots])

    @property
    def visible_specials(self) -> list[int]:
        """Numbers of the kept frames whose special keys are visible to the same frames."""
        first = self.kept if self._frames > 1 else 0
        return list(range(first, self.kept + self._frames))

    @property
    def visible_rows(self) -> slice:
        """Rows of `keys` and `values` that are visible to the single frame being written."""
        first = self._special_rows(self.kept).start
        return slice(first, self._patch_rows(self.visible_slots).start)

    @property
    def written_rows(self) -> tuple[int, int]:
        """First rows of the special and patch tokens of the single frame being written."""
        patch_row = self._patch_rows(self._slot(self.kept)).start
        return self._special_rows(self.kept).start, patch_row

    def write(self, frames: int, keep: bool) -> None:
        """
        Choose the slots of the next forward pass.

        Several frames at once (the scale batch) require an empty memory. With `keep` a single
        frame overwrites the oldest frame of the window in the ring. Without `keep` it goes to the
        scratch slot and attends to the whole window and itself; `commit` may still keep it.

        :raises StreamLimitError: the memory is full.
        :raises ValueError: a batch without `keep`, or after other frames.
        """
        if frames > 1 and (self.kept or not keep):
            raise ValueError(
                f'{frames} frames at once are possible only as the first batch, with keep=True; '
                'reset the memory first or pass one frame at a time'
            )
        if keep:
            self._require_room(frames)
        self._frames, self._in_scratch = frames, not keep
        for offset in range(frames):
            self.slot_frames[self._slot(self.kept + offset)] = self.kept + offset
        resident = self.shape.anchors + self.shape.window
        self.visible_slots = (
            min(self.kept + 1, resident) if keep else (min(self.kept, resident) + 1)
        )

    def commit(self) -> None:
        """
        Keep the frames just written; a frame in the scratch slot moves to its ring slot.

        :raises StreamLimitError: the memory is full.
        """
        if self._in_scratch:
            self._require_room(1)
            scratch, self._in_scratch = self._slot(self.kept), False
            ring = self._slot(self.kept)
            self.slot_frames[ring] = self.kept
            if ring != scratch:
                for buffer in (self.keys, self.values):
                    buffer[..., self._patch_rows(ring), :] = buffer[
                        ..., self._patch_rows(scratch), :
                    ]
        self.kept += self._frames
        self._frames = 0

    def undo(self) -> None:
        """Discard the frames just written."""
        self._frames = 0

    def adopt(self, other: 'StreamMemory') -> None:
        """
        Replace all frames by a copy of those of another memory.

        The two shapes may differ in `max_keyframes` only, and the frames must fit.
        """
        ours, theirs = self._kept_rows(other.kept), other._kept_rows(other.kept)
        self.keys[..., ours, :] = other.keys[..., theirs, :]
        self.values[..., ours, :] = other.values[..., theirs, :]
        self.camera_keys[..., : other.kept, :] = other.camera_keys[..., : other.kept, :]
        self.camera_values[..., : other.kept, :] = other.camera_values[..., : other.kept, :]
        self.slot_frames[: other.shape.resident] = other.slot_frames[: other.shape.resident]
        self.reset()
        self.kept = other.kept

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values (1, heads, S * P, head_dim); attend to all visible rows."""
        self._store(self.keys[layer], k)
        self._store(self.values[layer], v)
        if self._frames > 1:
            return attend_fully(q, k, v)
        visible = self.visible_rows
        return self.attend_cached(
            q, self.keys[layer, :, :, visible], self.values[layer, :, :, visible]
        )

    def attend_camera(self, iteration: int, depth: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store camera keys and values (1, heads, S, head_dim); attend to all kept frames."""
        end = self.kept + self._frames
        keys, values = self.camera_keys[iteration, depth], self.camera_values[iteration, depth]
        with torch.no_grad():  # the cache must not keep an autograd graph alive
            keys[:, :, self.kept : end] = k
            values[:, :, self.kept : end] = v
        return attend_fully(q.to(keys.dtype), keys[:, :, :end], values[:, :, :end])

    def _require_room(self, frames: int) -> None:
        if self.kept + frames > self.shape.max_keyframes:
            raise StreamLimitError(
                f'the memory is full: {self.kept} frames kept and max_keyframes is '
                f'{self.shape.max_keyframes}; raise max_keyframes or keyframe_interval, or reset'
            )

    def _slot(self, frame: int) -> int:
        """Return the patch slot of frame number `frame`, in the current mode (ring or scratch)."""
        anchors, window = self.shape.anchors, self.shape.window
        if self._in_scratch or (window == 0 and frame >= anchors):
            return min(frame, anchors + window)
        return frame if frame < anchors else anchors + (frame - anchors) % window

    @torch.no_grad()
    def _store(self, buffer: Tensor, rows: Tensor) -> None:
        frames, first, specials = self._frames, self.kept, self.shape.specials
        rows = rows.unflatten(2, (frames, -1))
        newest, oldest = self._special_rows(first + frames - 1), self._special_rows(first)
        buffer[:, :, newest.start : oldest.stop] = rows[:, :, :, :specials].flip(2).flatten(2, 3)
        if first + frames <= self.shape.anchors:  # the slots are contiguous
            slots = slice(self._patch_rows(first).start, self._patch_rows(first + frames).start)
            buffer[:, :, slots] = rows[:, :, :, specials:].flatten(2, 3)
            return
        for offset in range(frames):
            slot = self._patch_rows(self._slot(first + offset))
            buffer[:, :, slot] = rows[:, :, offset, specials:]

    def _kept_rows(self, frames: int) -> slice:
        """Return the rows of the first `frames` kept frames, without evicted patches."""
        slots = min(frames, self.shape.anchors + self.shape.window)
        first = self.shape.special_rows - self.shape.specials * frames
        return slice(first, self._patch_rows(slots).start)

    def _special_rows(self, frame: int) -> slice:
        end = self.shape.special_rows - self.shape.specials * frame
        return slice(end - self.shape.specials, end)

    def _patch_rows(self, slot: int) -> slice:
        start = self.shape.special_rows + self.shape.patches * slot
        return slice(start, start + self.shape.patches)


def _buffers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Allocate buffers for keys and values; raise OutOfMemoryError on any device, also the CPU."""
    try:
        with torch.inference_mode(False):  # inference tensors are read-only outside that mode
            return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    except (RuntimeError, TypeError) as error:  # from a CPU; sizes above 64 bits
        size = 2 * math.prod(shape) * dtype.itemsize / 1e9
        raise torch.OutOfMemoryError(
            f'{device} has no {size:.1f} GB free for the keys and values of past frames: lower '
            "'sliding_window', 'max_keyframes' or 'image_width'"
        ) from error
