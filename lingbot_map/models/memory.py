"""
StreamMemory: everything that outlives a frame, allocated once (spec sections 8 and 9).

Per trunk layer one buffer of key rows holds, side by side,

    special tokens, newest first   |   frame slots 0 .. anchors + window - 1   |   scratch slot
    row: special_rows - 6 (n + 1)  |   special_rows + slot * patches

so the keys that a frame sees are always one contiguous slice: attention needs no mask, no copy and
no shift, since rotary positions are already in the keys and softmax ignores their order.
"""

from dataclasses import dataclass
import math

from lingbot_map.layers.attention import attend_fully
import torch
from torch import Tensor


class StreamLimitError(RuntimeError):
    """The memory holds as many frames as it was made for."""


@dataclass(frozen=True)
class MemoryShape:
    """Sizes of a memory; `patches` and `specials` count tokens per frame."""

    layers: int
    heads: int
    head_dim: int
    patches: int
    specials: int
    anchors: int  # first kept frames, whose patches stay for ever
    window: int  # newest kept frames after the anchors whose patches stay
    max_keyframes: int  # frames that can be kept between two resets
    camera_iterations: int
    camera_depth: int
    camera_heads: int
    camera_head_dim: int

    @property
    def resident(self) -> int:
        """Frames whose patches can be held at once, without the scratch slot."""
        return min(self.anchors + self.window, self.max_keyframes)

    @property
    def special_rows(self) -> int:
        return self.specials * (self.max_keyframes + 1)

    @property
    def rows(self) -> int:
        return self.special_rows + self.patches * (self.resident + 1)

    @property
    def trunk_buffer(self) -> tuple[int, ...]:
        """Shape of the buffer of trunk keys, and of that of values."""
        return (self.layers, 1, self.heads, self.rows, self.head_dim)

    @property
    def camera_buffer(self) -> tuple[int, ...]:
        """Shape of the buffer of the camera head's keys, and of that of values."""
        depth, frames = max(self.camera_depth, 1), self.max_keyframes + 1
        return (self.camera_iterations, depth, 1, self.camera_heads, frames, self.camera_head_dim)


class StreamMemory:
    """Cached keys and values of one sequence; the protocol is write, forward, commit or undo."""

    def __init__(self, shape: MemoryShape, device: torch.device, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.keys, self.values = _buffers(shape.trunk_buffer, device, dtype)
        self.camera_keys, self.camera_values = _buffers(shape.camera_buffer, device, torch.float32)
        self.attend_cached = attend_fully  # the kernel for single frames
        self.slot_frames = [-1] * (shape.resident + 1)  # kept number of the frame in each slot
        self.reset()

    def reset(self) -> None:
        """Forget all frames; the buffers stay."""
        self.kept = 0
        self._frames = 0
        self.visible_slots = 0  # first slots whose patches the frame being written sees
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
        """Kept numbers of the frames whose patch keys the frames being written see."""
        if self._frames > 1:
            return list(range(self.kept, self.kept + self._frames))
        return sorted(self.slot_frames[: self.visible_slots])

    @property
    def visible_specials(self) -> list[int]:
        """Kept numbers of the frames whose special keys the frames being written see."""
        first = self.kept if self._frames > 1 else 0
        return list(range(first, self.kept + self._frames))

    @property
    def visible_rows(self) -> slice:
        """Rows of `keys` and `values` that the single frame being written sees."""
        first = self._special_rows(self.kept).start
        return slice(first, self._patch_rows(self.visible_slots).start)

    @property
    def written_rows(self) -> tuple[int, int]:
        """First rows for the special and the patch tokens of the single frame being written."""
        patch_row = self._patch_rows(self._slot(self.kept)).start
        return self._special_rows(self.kept).start, patch_row

    def write(self, frames: int, keep: bool) -> None:
        """
        Choose the slots of the next forward pass.

        Several frames at once (the scale batch) are possible on an empty memory only. With `keep`
        a single frame takes its ring slot and the oldest window frame goes; without, it goes to
        the scratch slot, sees the whole window beside itself, and `commit` may still keep it.

        :raises StreamLimitError: no room for another kept frame.
        :raises ValueError: a batch that is not kept, or that comes after other frames.
        """
        if frames > 1 and (self.kept or not keep):
            raise ValueError(
                f'{frames} frames at once are possible only as the first, kept batch; '
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

        :raises StreamLimitError: no room for the frame in the scratch slot.
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
        """Forget the frame just written, as if it had not been."""
        self._frames = 0

    def adopt(self, other: 'StreamMemory') -> None:
        """
        Go on from the frames that another memory keeps, in place of the own ones, by copying.

        The shapes may differ in `max_keyframes` only; these frames have to fit.
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
        """Store keys and values (1, heads, S * P, head_dim) and attend to what is visible."""
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
        with torch.no_grad():  # what outlives the frame keeps no graph alive
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
        """Return the patch slot of the frame with kept number `frame` in the current mode."""
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
        if first + frames <= self.shape.anchors:  # the slots lie in a row
            slots = slice(self._patch_rows(first).start, self._patch_rows(first + frames).start)
            buffer[:, :, slots] = rows[:, :, :, specials:].flatten(2, 3)
            return
        for offset in range(frames):
            slot = self._patch_rows(self._slot(first + offset))
            buffer[:, :, slot] = rows[:, :, offset, specials:]

    def _kept_rows(self, frames: int) -> slice:
        """Return the rows of `frames` kept frames, as far as they are still there."""
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
    """Return buffers for keys and values; OutOfMemoryError: also on a CPU."""
    try:
        with torch.inference_mode(False):  # or they could be written in that mode only
            return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    except (RuntimeError, TypeError) as error:  # of a CPU, and of sizes beyond 64 bits
        size = 2 * math.prod(shape) * dtype.itemsize / 1e9
        raise torch.OutOfMemoryError(
            f'{device} has no {size:.1f} GB for the keys and values of past frames: lower '
            "'sliding_window', 'max_keyframes' or 'image_width'"
        ) from error
