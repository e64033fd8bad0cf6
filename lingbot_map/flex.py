"""Masked attention over whole clips on CUDA: block-sparse, compiled, equal to the dense mask."""

from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.sequence import Visibility
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

MAX_FRAMES = 128


class FlexAttention:
    """Keep the visibility tables at one address, so that one compilation serves every mask."""

    def __init__(self, model: GCTStream, device: torch.device):
        self.model = model
        self.patches = torch.zeros(MAX_FRAMES, MAX_FRAMES, dtype=torch.bool, device=device)
        self.specials = torch.zeros_like(self.patches)
        self._attend = torch.compile(flex_attention)
        self._mask = torch.compile(create_block_mask)

    def bind(self, images: Tensor, seen: Visibility):
        """Return `attend_tokens(q, k, v)` for clips (B, S, 3, H, W) under `seen`."""
        frames, specials = images.shape[1], self.model.aggregator.patch_start_idx
        tokens = specials + images[0, 0, 0].numel() // self.model.patch_size ** 2
        self.patches[:frames, :frames] = seen.patches
        self.specials[:frames, :frames] = seen.specials
        patch_table, special_table = self.patches, self.specials

        def sees(_batch, _head, query, key):
            query_frame, key_frame = query // tokens, key // tokens
            return torch.where(key % tokens < specials, special_table[query_frame, key_frame],
                               patch_table[query_frame, key_frame])

        length = frames * tokens
        mask = self._mask(sees, None, None, length, length, device=images.device)
        return lambda q, k, v: self._attend(q, k, v, block_mask=mask)
