"""Whole sequences in one masked pass: the numbers of frame-by-frame streaming, with gradients."""

from dataclasses import dataclass
from functools import partial

from lingbot_map.layers.attention import attend_masked
from lingbot_map.models.gct_stream import GCTStream, Outputs
import torch
from torch import Tensor


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
