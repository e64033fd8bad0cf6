"""Masked attention over whole clips on CUDA: block-sparse, compiled, equal to the dense mask."""

from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.train.sequence import Visibility
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens of a frame are padded to this, so that a block is a frame
MAX_FRAMES = 128
KERNEL_OPTIONS = {'BLOCK_M': 64, 'BLOCK_N': 64}  # tiles of the forward kernel


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
        self._mask = _mask_of(self._limit)

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


def _mask_of(limit: Tensor):
    def sees(_batch, _head, query, key):
        return key % BLOCK < limit[query // BLOCK, key // BLOCK]

    return sees
