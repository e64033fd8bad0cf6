"""Resize and crop RGB images to the network's input, with the pixel mapping (spec section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from lingbot_map.errors import UserError
import numpy as np
from PIL import Image, ImageOps
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PixelMap:
    """Mapping of network pixels to the original image: original = (network + crop) / scale."""

    scale_x: float
    scale_y: float
    crop_x: int
    crop_y: int
    network_size: tuple[int, int]  # width, height
    original_size: tuple[int, int]  # width, height

    def to_original(self, K: np.ndarray) -> np.ndarray:
        """Convert intrinsics (3, 3) from network pixels to original pixels."""
        back = np.array(
            [
                [1 / self.scale_x, 0, self.crop_x / self.scale_x],
                [0, 1 / self.scale_y, self.crop_y / self.scale_y],
                [0, 0, 1],
            ]
        )
        return back @ K

    def to_network(self, K: np.ndarray) -> np.ndarray:
        """Convert intrinsics (3, 3) from original pixels to network pixels."""
        there = np.array(
            [[self.scale_x, 0, -self.crop_x], [0, self.scale_y, -self.crop_y], [0, 0, 1]]
        )
        return there @ K


def crop_map(width: int, height: int, target: int, patch: int) -> PixelMap:
    """
    Return the mapping of crop mode: resize to width `target`, crop top and bottom if taller.

    :raises UserError: the image is so wide that the result has no full row of patches.
    """
    resized = round(height * (target / width) / patch) * patch
    if resized == 0:
        raise UserError(
            f'image size {width}x{height} is too wide: at network width {target} '
            f'it has no full row of {patch}-pixel patches; crop the images'
        )
    crop_y = max(resized - target, 0) // 2
    return PixelMap(
        target / width,
        resized / height,
        0,
        crop_y,
        (target, min(resized, target)),
        (width, height),
    )


def resize_pillow(rgb: np.ndarray, mapping: PixelMap) -> np.ndarray:
    """Resize an image (H, W, 3) to (h, w, 3) uint8 with Pillow, the reference."""
    width, height = mapping.network_size
    full = (width, round(mapping.original_size[1] * mapping.scale_y))
    if full == mapping.original_size:
        resized = rgb
    else:
        resized = np.asarray(Image.fromarray(rgb).resize(full, Image.Resampling.BICUBIC))
    return resized[mapping.crop_y : mapping.crop_y + height]


def resize_on_device(rgb: Tensor, mapping: PixelMap) -> Tensor:
    """
    Resize an image (H, W, 3) uint8 to (3, h, w) uint8 on its device.

    Resizes width, then height, and rounds after each, as Pillow does. Very few values differ from
    those of `resize_pillow`, and those by 1.
    """
    width, height = mapping.network_size
    full_height = round(mapping.original_size[1] * mapping.scale_y)
    image = rgb.permute(2, 0, 1)[None]
    for size in ((image.shape[2], width), (full_height, width)):
        if size != tuple(image.shape[2:]):
            image = F.interpolate(image.float(), size=size, mode='bicubic', antialias=True)
            image = image.round().clamp(0, 255).byte()
    return image[0, :, mapping.crop_y : mapping.crop_y + height]


def load_images(paths: Sequence, mode: str = 'crop', target: int = 518, patch: int = 14) -> Tensor:
    """
    Load image files as (N, 3, H, W) float32 in [0, 1]; pad smaller ones with white.

    `mode`: 'crop' (width = target) or 'pad' (square, longer side = target).
    """
    resize = {'crop': _crop, 'pad': _pad}[mode]
    images = [resize(open_rgb(path), target, patch) for path in paths]
    height = max(image.shape[0] for image in images)
    width = max(image.shape[1] for image in images)
    stack = np.stack([_pad_to(image, height, width) for image in images])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 255


def open_rgb(path) -> np.ndarray:
    """Load an image file as (H, W, 3) uint8; apply EXIF orientation, blend RGBA over white."""
    return picture_rgb(Image.open(path))


def picture_rgb(picture: Image.Image) -> np.ndarray:
    """Convert a PIL image to (H, W, 3) uint8; apply EXIF orientation, blend RGBA over white."""
    image = ImageOps.exif_transpose(picture)
    if image.mode.startswith('I'):  # Pillow would clip 16-bit grey values to white
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == 'RGBA':
        white = Image.new('RGBA', image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert('RGB'))


def _crop(rgb: np.ndarray, target: int, patch: int) -> np.ndarray:
    return resize_pillow(rgb, crop_map(rgb.shape[1], rgb.shape[0], target, patch))


def _pad(rgb: np.ndarray, target: int, patch: int) -> np.ndarray:
    height, width = rgb.shape[:2]
    if width >= height:
        size = (target, round(height * (target / width) / patch) * patch)
    else:
        size = (round(width * (target / height) / patch) * patch, target)
    if 0 in size:
        raise UserError(f'image size {width}x{height} has no full patch at target {target}')
    resized = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BICUBIC))
    return _pad_to(resized, target, target)


def _pad_to(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pad with white on all sides; an odd pixel goes to the bottom or right."""
    down, right = height - rgb.shape[0], width - rgb.shape[1]
    return np.pad(
        rgb,
        ((down // 2, down - down // 2), (right // 2, right - right // 2), (0, 0)),
        constant_values=255,
    )
