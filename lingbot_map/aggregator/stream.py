"""AggregatorStream: special tokens, frame and global attention (spec sections 5 to 8)."""

from collections.abc import Callable
from functools import partial

from lingbot_map.layers.attention import parameter_dtype
from lingbot_map.layers.block import Block
from lingbot_map.layers.rope import grid_positions, rope_2d, rope_3d, Rotary
import torch
from torch import nn, Tensor

GlobalAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class AggregatorStream(nn.Module):
    """The trunk. It holds weights only; the caller keeps past keys and values (see `attend`)."""

    def __init__(
        self,
        patch_embed: nn.Module,
        dim: int,
        depth: int,
        num_heads: int,
        *,
        patch_size: int,
        selected_layers: tuple[int, ...],
        mlp_ratio: float = 4.0,
        num_register_tokens: int = 4,
        rope: str = '3d',
    ):
        super().__init__()
        self.patch_embed = patch_embed
        self.patch_size = patch_size
        self.selected_layers = tuple(selected_layers)
        self.rope = rope  # encoding of the global blocks: '3d', '2d' or 'none'
        self.head_dim = dim // num_heads
        self.patch_start_idx = 2 + num_register_tokens
        self.camera_token = nn.Parameter(0.02 * torch.randn(1, 2, 1, dim))
        self.register_token = nn.Parameter(0.02 * torch.randn(1, 2, num_register_tokens, dim))
        self.scale_token = nn.Parameter(0.02 * torch.randn(1, 2, 1, dim))
        self.frame_blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, qk_norm=True) for _ in range(depth)
        )
        self.global_blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, qk_norm=True) for _ in range(depth)
        )
        # The explicit device gives these constants values even if the model is built on 'meta'.
        for name, value in (('_resnet_mean', IMAGE_MEAN), ('_resnet_std', IMAGE_STD)):
            constant = torch.tensor(value, device='cpu').view(1, 1, 3, 1, 1)
            self.register_buffer(name, constant, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of matrix products, attention and cached keys."""
        return parameter_dtype(self.global_blocks)

    def forward(
        self, images: Tensor, index: Tensor, num_frame_for_scale: int, attend: GlobalAttend
    ) -> list[Tensor]:
        """
        Return the selected layers' tokens, each (B, S, P, 2 dim), frame part first.

        `images` (B, S, 3, H, W) in [0, 1]; `index` (S,) number of frames kept before each frame;
        `attend(layer, q, k, v)` computes global attention, q, k, v (B, heads, S * P, head_dim).
        """
        rows, cols = (size // self.patch_size for size in images.shape[-2:])
        x = self.embed(images, index, num_frame_for_scale)
        batch, frames, tokens, _ = x.shape
        local_rotary = self.frame_rotary(rows, cols, images.device)
        global_rotary = self.global_rotary(index, rows, cols)
        selected = []
        for layer, (frame_block, global_block) in enumerate(
            zip(self.frame_blocks, self.global_blocks, strict=True)
        ):
            local = frame_block(x.flatten(0, 1), local_rotary).unflatten(0, (batch, frames))
            x = global_block(local.flatten(1, 2), global_rotary, partial(attend, layer))
            x = x.unflatten(1, (frames, tokens))
            if layer in self.selected_layers:
                selected.append(torch.cat((local, x), -1))
        return selected

    def embed(self, images: Tensor, index: Tensor, num_frame_for_scale: int) -> Tensor:
        """Return tokens (B, S, P, dim): camera, registers, scale, patches (spec section 5)."""
        patches = self.patch_embed(self.normalise(images).flatten(0, 1))
        later = (index > 0).long()
        unscaled = (index >= max(num_frame_for_scale, 1)).long()
        specials = torch.cat(
            (
                self.camera_token[:, later],
                self.register_token[:, later],
                self.scale_token[:, unscaled],
            ),
            2,
        ).expand(len(images), -1, -1, -1)
        patches = patches.unflatten(0, images.shape[:2])
        # The residual stream of the trunk is float32 (spec section 11).
        return torch.cat((specials.float(), patches.float()), 2)

    def normalise(self, images: Tensor) -> Tensor:
        """Subtract the encoder's mean and divide by its standard deviation."""
        return (images - self._resnet_mean) / self._resnet_std

    def frame_rotary(self, rows: int, cols: int, device: torch.device) -> Rotary:
        """Return the 2-D encoding of one frame's tokens; special tokens are at (0, 0)."""
        patches = grid_positions(rows, cols, device) + 1
        specials = patches.new_zeros(self.patch_start_idx, 2)
        return rope_2d(torch.cat((specials, patches)), self.head_dim)

    def global_rotary(self, index: Tensor, rows: int, cols: int) -> Rotary | None:
        """Return the encoding of all tokens of frames at temporal positions `index` (S,)."""
        if self.rope == 'none':
            return None
        if self.rope == '2d':
            table = self.frame_rotary(rows, cols, index.device)
            return Rotary(
                table.cos.repeat(len(index), 1, 1),
                table.sin.repeat(len(index), 1, 1),
                table.interleaved,
            )
        specials = torch.arange(self.patch_start_idx, device=index.device)[:, None].expand(-1, 2)
        patches = grid_positions(rows, cols, index.device) + self.patch_start_idx
        space = torch.cat((specials, patches)).expand(len(index), -1, -1)
        time = index[:, None, None].expand(-1, space.shape[1], 1)
        return rope_3d(torch.cat((time, space), -1).flatten(0, 1), self.head_dim)
