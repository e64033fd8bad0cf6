"""Whole sequences in one masked pass: the numbers of frame-by-frame streaming, with gradients."""

from dataclasses import dataclass
from functools import partial

from lingbot_map.layers.attention import attend_masked
from lingbot_map.models.gct_stream import GCTStream, Outputs
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens of a frame are padded to this, so that a block is a frame
MAX_FRAMES = 128
KERNEL_OPTIONS = {'BLOCK_M': 64, 'BLOCK_N': 64}  # tiles of the forward kernel


@dataclass(frozen=True)
class Visibility:
    """
    Which frame (row) sees which frame's keys (column), boolean (S, S) (spec section 8).

    `index` (S,): frames kept before each frame, its temporal position.
    """

    patches: Tensor
    specials: Tensor
    index: Tensor


def visibility(
    frames: int, scale_frames: int, anchors: int, window: int, keyframe_interval: int
) -> Visibility:
    """Return what streaming `frames` frames would see; `window` is at least 1."""
    number = torch.arange(frames)
    scale = number < scale_frames
    kept = scale | ((number - scale_frames) % keyframe_interval == 0)
    index = kept.cumsum(0) - kept.long()
    query, key = number[:, None], number[None]
    specials = (kept[None] & (key < query)) | (key == query)
    # A keyframe pushes out the oldest window frame before it looks, a non-keyframe does not.
    oldest = torch.where(kept, index + 1, index)[:, None] - window
    patches = specials & ((index[None] < anchors) | (index[None] >= oldest) | (key == query))
    together = scale[:, None] & scale[None]
    patches = torch.where(scale[:, None], together, patches)
    specials = torch.where(scale[:, None], together, specials)
    return Visibility(patches, specials, index)


def token_mask(seen: Visibility, num_specials: int, num_patches: int) -> Tensor:
    """Return which token sees which, boolean (S * P, S * P), frame-major."""
    tokens = num_specials + num_patches
    special = torch.arange(tokens, device=seen.patches.device) < num_specials
    by_key = torch.where(special, seen.specials[..., None], seen.patches[..., None])
    return by_key.flatten(1).repeat_interleave(tokens, 0)


def forward_sequence(
    model: GCTStream, images: Tensor, seen: Visibility, scale_frames: int, attend_tokens=None
) -> Outputs:
    """
    Run clips (B, S, 3, H, W) in [0, 1] at once; returns what `GCTStream.predict` returns.

    `attend_tokens(q, k, v)` replaces dense masked attention by an equal, faster kernel.
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
    """Return `attend_tokens(q, k, v)` with the mask spelled out."""
    patches = images[0, 0, 0].numel() // model.patch_size**2
    mask = token_mask(seen, model.aggregator.patch_start_idx, patches)
    return partial(attend_masked, mask=mask)


class FlexAttention:
    """
    Attend under a frame-level mask.

    The visibility table keeps its address, so that one compilation serves every mask.
    """

    def __init__(self, model: GCTStream, device: torch.device):
        self._model = model
        # How many of a frame's tokens, special ones first, another frame sees.
        self._limit = torch.zeros(MAX_FRAMES, MAX_FRAMES, dtype=torch.int32, device=device)
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._mask = _mask_mod(self._limit)

    def bind(self, images: Tensor, seen: Visibility):
        """
        Return `attend_tokens(q, k, v)` for clips (B, S, 3, H, W) under `seen`.

        :raises ValueError: more tokens per frame than a block has.
        """
        frames = images.shape[1]
        tokens = self._model.aggregator.patch_start_idx + (
            images[0, 0, 0].numel() // self._model.patch_size**2
        )
        if tokens > BLOCK or frames > MAX_FRAMES:
            raise ValueError(
                f'{frames} frames of {tokens} tokens: at most {MAX_FRAMES} frames of '
                f'{BLOCK} tokens can be trained'
            )
        specials = self._model.aggregator.patch_start_idx
        # A frame's patches are seen only together with its special tokens.
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
    def sees(_batch, _head, query, key):
        return key % BLOCK < limit[query // BLOCK, key // BLOCK]

    return sees
