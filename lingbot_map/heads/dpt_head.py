"""DPTHead: dense depth or point maps from the tokens of four trunk layers (spec section 10)."""

from lingbot_map.layers.attention import LayerNorm
import torch
from torch import nn, Tensor
from torch.nn import functional as F

FRAMES_PER_CHUNK = 8
PositionMap = tuple[Tensor, Tensor]  # of columns, of rows


class ResidualConvUnit(nn.Module):
    """Two convolutions with a skip connection; ReLU is applied to the skip too (checkpoints)."""

    def __init__(self, features: int):
        super().__init__()
        self.conv1 = nn.Conv2d(features, features, 3, padding=1)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return x + self.conv2(F.relu(self.conv1(x)))


class FeatureFusion(nn.Module):
    """Add a finer feature map, refine, resize and project."""

    def __init__(self, features: int, has_lateral: bool):
        super().__init__()
        if has_lateral:
            self.resConfUnit1 = ResidualConvUnit(features)
        self.resConfUnit2 = ResidualConvUnit(features)
        self.out_conv = nn.Conv2d(features, features, 1)

    def forward(self, x: Tensor, lateral: Tensor | None, size: tuple[int, int]) -> Tensor:
        if lateral is not None:
            x = x + self.resConfUnit1(lateral)
        return self.out_conv(resize(self.resConfUnit2(x), size))


class DPTHead(nn.Module):
    """Decode tokens into `num_outputs` channels per pixel; the last one is confidence."""

    def __init__(
        self,
        dim: int,
        features: int,
        out_channels: tuple[int, ...],
        num_outputs: int,
        patch_size: int,
    ):
        super().__init__()
        a, b, c, d = out_channels
        self.patch_size = patch_size
        # Limits the memory of a large batch; does not affect the outputs.
        self.frames_per_chunk = FRAMES_PER_CHUNK
        self._maps: dict[tuple, list[PositionMap]] = {}  # key: height, width, device
        self.norm = LayerNorm(dim, eps=1e-5)
        self.projects = nn.ModuleList(nn.Conv2d(dim, width, 1) for width in out_channels)
        self.resize_layers = nn.ModuleList(
            (
                nn.ConvTranspose2d(a, a, 4, 4),
                nn.ConvTranspose2d(b, b, 2, 2),
                nn.Identity(),
                nn.Conv2d(d, d, 3, 2, 1),
            )
        )
        self.scratch = nn.Module()
        for level, width in enumerate(out_channels, 1):
            convolution = nn.Conv2d(width, features, 3, padding=1, bias=False)
            setattr(self.scratch, f'layer{level}_rn', convolution)
            setattr(self.scratch, f'refinenet{level}', FeatureFusion(features, level < 4))
        self.scratch.output_conv1 = nn.Conv2d(features, features // 2, 3, padding=1)
        self.scratch.output_conv2 = nn.Sequential(
            nn.Conv2d(features // 2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, num_outputs, 1)
        )

    def forward(self, layers: list[Tensor], height: int, width: int) -> tuple[Tensor, Tensor]:
        """
        Return raw values (B, S, H, W, outputs - 1) and confidence (B, S, H, W) >= 1.

        `layers`: four tensors (B, S, patches, dim) in float32, patch tokens only.
        """
        batch, frames = layers[0].shape[:2]
        layers = [layer.flatten(0, 1) for layer in layers]
        maps = self.position_maps(height, width, layers[0].device)
        chunks = [
            self.decode([x[i : i + self.frames_per_chunk] for x in layers], maps, height, width)
            for i in range(0, batch * frames, self.frames_per_chunk)
        ]
        out = torch.cat(chunks).unflatten(0, (batch, frames)).movedim(-3, -1)
        return out[..., :-1], 1 + out[..., -1].exp()

    def position_maps(self, height: int, width: int, device: torch.device) -> list[PositionMap]:
        """Return position maps for the four laterals and for the input of `output_conv2`."""
        key = height, width, device
        if key not in self._maps:
            aspect, grid = width / height, (height // self.patch_size, width // self.patch_size)
            whole = tuple(self.patch_size * size for size in grid)
            channels = self.scratch.output_conv1.out_channels
            self._maps[key] = [
                position_map(project.out_channels, *grid, aspect, device)
                for project in self.projects
            ] + [position_map(channels, *whole, aspect, device)]
        return self._maps[key]

    def decode(
        self, layers: list[Tensor], positions: list[PositionMap], height: int, width: int
    ) -> Tensor:
        """Decode the tokens of N frames into (N, outputs, H, W)."""
        rows, cols = height // self.patch_size, width // self.patch_size
        maps = [
            self.lateral(level, tokens, (rows, cols), positions[level])
            for level, tokens in enumerate(layers)
        ]
        x, scratch = None, self.scratch
        for level in (4, 3, 2, 1):
            lateral = maps[level - 1]
            finer = (
                maps[level - 2].shape[-2:]
                if level > 1
                else tuple(2 * size for size in lateral.shape[-2:])
            )
            fuse = getattr(scratch, f'refinenet{level}')
            x = fuse(lateral, None, finer) if x is None else fuse(x, lateral, finer)
        x = resize(scratch.output_conv1(x), (rows * self.patch_size, cols * self.patch_size))
        # Depth is the exponential of this output, so the last convolutions stay float32.
        return scratch.output_conv2(add_position_map(x, positions[-1]).float())

    def lateral(
        self, level: int, tokens: Tensor, grid: tuple[int, int], position: PositionMap
    ) -> Tensor:
        """Return the feature map of one trunk layer at its own resolution."""
        x = self.norm(tokens).transpose(1, 2).unflatten(2, grid)
        project = self.projects[level]
        x = add_position_map(project(x.to(project.weight.dtype)), position)
        return getattr(self.scratch, f'layer{level + 1}_rn')(self.resize_layers[level](x))


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize maps (N, C, h, w) bilinearly with aligned corners."""
    return F.interpolate(x, size=size, mode='bilinear', align_corners=True)


def add_position_map(x: Tensor, position: PositionMap) -> Tensor:
    """
    Add the sine-cosine map of pixel positions to (N, C, h, w).

    The first half of the channels depends on the column only, the second half on the row only.
    """
    by_col, by_row = position
    rows, cols = x.shape[-2:]
    return x + torch.cat(
        (by_col[:, None, :].expand(-1, rows, -1), by_row[:, :, None].expand(-1, -1, cols))
    ).to(x.dtype)


def position_map(
    channels: int, rows: int, cols: int, aspect: float, device: torch.device | None = None
) -> PositionMap:
    """Return maps (C / 2, cols) and (C / 2, rows), scaled by 0.1; `aspect` = width / height."""
    diagonal = (aspect**2 + 1) ** 0.5
    count = channels // 4
    omega = 100.0 ** -(torch.arange(count, device=device, dtype=torch.float64) / count)
    halves = []
    for size, span in ((cols, aspect / diagonal), (rows, 1 / diagonal)):
        limit = span * (size - 1) / size
        positions = torch.linspace(-limit, limit, size, device=device, dtype=torch.float32)
        angles = omega[:, None] * positions.double()
        halves.append(0.1 * torch.cat((angles.sin(), angles.cos())).float())
    return halves[0], halves[1]
