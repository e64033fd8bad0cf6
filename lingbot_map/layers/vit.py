"""Patch encoders: a ViT with register tokens, or one convolution (spec section 4)."""

from lingbot_map.layers.attention import LayerNorm
from lingbot_map.layers.block import Block
import torch
from torch import nn, Tensor
from torch.nn import functional as F

# Patch encoder name -> (depth, heads). A name with 'conv' selects one convolution instead.
ENCODERS = {
    'dinov2_vits14_reg': (12, 6),
    'dinov2_vitb14_reg': (12, 12),
    'dinov2_vitl14_reg': (24, 16),
    'dinov2_vitg2_reg': (40, 24),
}


class PatchEmbed(nn.Module):
    """Embed images (N, 3, H, W) as tokens (N, patches, dim), patches in row-major order."""

    def __init__(self, patch_size: int, dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)


class PatchEncoder(nn.Module):
    """Encode images into normalised patch tokens (N, patches, dim)."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        dim: int,
        depth: int,
        num_heads: int,
        num_register_tokens: int = 4,
        mlp_ratio: float = 4.0,
    ):
        super().__init__()
        side = img_size // patch_size
        self.patch_size = patch_size
        self.patch_embed = PatchEmbed(patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + side * side, dim))
        self.register_tokens = nn.Parameter(0.02 * torch.randn(1, num_register_tokens, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, dim))  # unused, but in checkpoints
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, eps=1e-6) for _ in range(depth)
        )
        self.norm = LayerNorm(dim, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 1 + self.register_tokens.shape[1] :]

    def embed(self, images: Tensor) -> Tensor:
        """Return class token, registers and patches (N, tokens, dim), with position embeddings."""
        patches = self.patch_embed(images)
        rows, cols = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        table = resample_pos_embed(self.pos_embed, rows, cols)
        cls = (self.cls_token + table[:, :1]).expand(len(images), -1, -1)
        registers = self.register_tokens.expand(len(images), -1, -1)
        return torch.cat((cls, registers, patches + table[:, 1:]), 1)


def encoder_size(name: str) -> tuple[int, int]:
    """Return depth and heads of the patch encoder `name`; raise ValueError if unknown."""
    if name not in ENCODERS:
        raise ValueError(
            f"patch_embed '{name}' is unknown; use one of {', '.join(ENCODERS)} "
            "or a name with 'conv'"
        )
    return ENCODERS[name]


def resample_pos_embed(table: Tensor, rows: int, cols: int) -> Tensor:
    """
    Resample position embeddings (1, 1 + M * M, dim) to (1, 1 + rows * cols, dim), float32.

    Bicubic with antialias, also when upsampling; the class entry is unchanged (spec section 4).
    """
    side = round((table.shape[1] - 1) ** 0.5)
    if rows == cols == side:
        return table.float()
    grid = table[:, 1:].float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(rows, cols), mode='bicubic', antialias=True)
    return torch.cat((table[:, :1].float(), grid.flatten(2).transpose(1, 2)), 1)
