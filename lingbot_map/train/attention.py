"""
Run a whole clip in one masked pass, with gradients and the same results as streaming.

`visibility` builds the frame-level mask of a stream. `forward_sequence` runs the network under it,
with `dense_attention` (any device) or `FlexAttention` (CUDA, faster).
"""

from dataclasses import dataclass
from functools import partial

from lingbot_map.layers.attention import attend_masked
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.windows import Outputs
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens per frame after padding: one block of the mask is one frame
MAX_FRAMES = 128
KERNEL_OPTIONS = {'BLOCK_M': 64, 'BLOCK_N': 64}  # tiles of the forward kernel


@dataclass(frozen=True)
class Visibility:
    """
    Masks (S, S), boolean: frame (row) attends to the keys of frame (column) (spec section 8).

    `index` (S,): number of frames kept before each frame, its temporal position.
    """

    patches: Tensor
    specials: Tensor
    index: Tensor


def visibility(
    frames: int, scale_frames: int, anchors: int, window: int, keyframe_interval: int
) -> Visibility:
    """Return the masks of a stream of `frames` frames; `window` must be at least 1."""
    number = torch.arange(frames)
    scale = number < scale_frames
    kept = scale | ((number - scale_frames) % keyframe_interval == 0)
    index = kept.cumsum(0) - kept.long()
    query, key = number[:, None], number[None]
    specials = (kept[None] & (key < query)) | (key == query)
    # A keyframe evicts the oldest frame of the window before attention; a non-keyframe does not.
    oldest = torch.where(kept, index + 1, index)[:, None] - window
    patches = specials & ((index[None] < anchors) | (index[None] >= oldest) | (key == query))
    together = scale[:, None] & scale[None]
    patches = torch.where(scale[:, None], together, patches)
    specials = torch.where(scale[:, None], together, specials)
    return Visibility(patches, specials, index)


def token_mask(seen: Visibility, num_specials: int, num_patches: int) -> Tensor:
    """Return the mask over tokens, boolean (S * P, S * P), frame-major."""
    tokens = num_specials + num_patches
    special = torch.arange(tokens, device=seen.patches.device) < num_specials
    by_key = torch.where(special, seen.specials[..., None], seen.patches[..., None])
    return by_key.flatten(1).repeat_interleave(tokens, 0)


def forward_sequence(
    model: GCTStream, images: Tensor, seen: Visibility, scale_frames: int, attend_tokens=None
) -> Outputs:
    """
    Run clips (B, S, 3, H, W) in [0, 1] in one pass; returns the outputs of `GCTStream.predict`.

    `attend_tokens(q, k, v)` replaces dense masked attention by a faster kernel.
    """
    attend_tokens = attend_tokens or dense_attention(model, images, seen)
    return model.predict(
        images,
        seen.index,
        scale_frames,
        lambda _layer, q, k, v: attend_tokens(q, k, v),
        lambda _iteration, _block, q, k, v: attend_masked(q, k, v, seen.specials),
    )


def dense_attention(model: GCTStream, images: Tensor, seen: Visibility):
    """Return `attend_tokens(q, k, v)` with an explicit mask over all tokens."""
    patches = images[0, 0, 0].numel() // model.patch_size**2
    mask = token_mask(seen, model.aggregator.patch_start_idx, patches)
    return partial(attend_masked, mask=mask)


class FlexAttention:
    """
    Masked attention with a compiled FlexAttention kernel.

    The mask is read from a tensor at a fixed address, so one compilation serves all masks.
    """

    def __init__(self, model: GCTStream, device: torch.device):
        self._model = model
        # (query frame, key frame) -> number of visible tokens; special tokens come first.
        self._limit = torch.zeros(MAX_FRAMES, MAX_FRAMES, dtype=torch.int32, device=device)
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._mask = _mask_mod(self._limit)

    def bind(self, images: Tensor, seen: Visibility):
        """
        Return `attend_tokens(q, k, v)` for clips (B, S, 3, H, W) under `seen`.

        :raises ValueError: too many frames, or too many tokens per frame.
        """
        frames = images.shape[1]
        tokens = self._model.aggregator.patch_start_idx + (
            images[0, 0, 0].numel() // self._model.patch_size**2
        )
        if tokens > BLOCK or frames > MAX_FRAMES:
            raise ValueError(
                f'clips have {frames} frames of {tokens} tokens; training supports at most '
                f'{MAX_FRAMES} frames of {BLOCK} tokens'
            )
        specials = self._model.aggregator.patch_start_idx
        # Where a frame's patches are visible, its special tokens are too.
        self._limit[:frames, :frames] = torch.where(
            seen.patches, tokens, specials * seen.specials.int()
        )
        visible = seen.specials.to(torch.int8)
        order = visible.argsort(dim=-1, descending=True, stable=True).int()
        mask = BlockMask.from_kv_blocks(
            visible.sum(-1, dtype=torch.int32)[None, None],
            order[None, None],
            BLOCK_SIZE=BLOCK,
            mask_mod=self._mask,
            seq_lengths=(frames * BLOCK, frames * BLOCK),
        )

        def attend_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (
                F.pad(x.unflatten(2, (frames, tokens)), (0, 0, 0, BLOCK - tokens)).flatten(2, 3)
                for x in (q, k, v)
            )
            out = self._attend(q, k, v, block_mask=mask, kernel_options=KERNEL_OPTIONS)
            return out.unflatten(2, (frames, BLOCK))[:, :, :, :tokens].flatten(2, 3)

        return attend_tokens


def _mask_mod(limit: Tensor):
    def is_visible(_batch, _head, query, key):
        return key % BLOCK < limit[query // BLOCK, key // BLOCK]

    return is_visible
