"""From uint8 RGB to the network's input, and from its pixels back (spec section 3)."""

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
    """Where network pixels lie in the original image: original = (network + crop) / scale."""

    scale_x: float
    scale_y: float
    crop_x: int
    crop_y: int
    network_size: tuple[int, int]  # width, height
    original_size: tuple[int, int]  # width, height

    def to_original(self, K: np.ndarray) -> np.ndarray:
        """Return intrinsics (3, 3) in original pixels of intrinsics in network pixels."""
        back = np.array(
            [
                [1 / self.scale_x, 0, self.crop_x / self.scale_x],
                [0, 1 / self.scale_y, self.crop_y / self.scale_y],
                [0, 0, 1],
            ]
        )
        return back @ K

    def to_network(self, K: np.ndarray) -> np.ndarray:
        """Return intrinsics (3, 3) in network pixels of intrinsics in original pixels."""
        there = np.array(
            [[self.scale_x, 0, -self.crop_x], [0, self.scale_y, -self.crop_y], [0, 0, 1]]
        )
        return there @ K


def crop_map(width: int, height: int, target: int, patch: int) -> PixelMap:
    """
    Return the mapping of crop mode: width becomes `target`, tall images lose top and bottom.

    :raises UserError: an image so wide that no patch row would be left.
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
    """Return the network's pixels (h, w, 3) uint8 of an image (H, W, 3): the exact reference."""
    width, height = mapping.network_size
    full = (width, round(mapping.original_size[1] * mapping.scale_y))
    if full == mapping.original_size:
        resized = rgb
    else:
        resized = np.asarray(Image.fromarray(rgb).resize(full, Image.Resampling.BICUBIC))
    return resized[mapping.crop_y : mapping.crop_y + height]


def resize_on_device(rgb: Tensor, mapping: PixelMap) -> Tensor:
    """
    Return the network's pixels (3, h, w) uint8 of an image (H, W, 3) on the same device.

    Width first, then height, rounded after each as Pillow does: next to no value of
    `resize_pillow` differs, and by 1 where it does.
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
    Return image files as (N, 3, H, W) float32 in [0, 1]; smaller ones are padded with white.

    `mode`: 'crop' (width = target) or 'pad' (square, longer side = target).
    """
    resize = {'crop': _crop, 'pad': _pad}[mode]
    images = [resize(open_rgb(path), target, patch) for path in paths]
    height = max(image.shape[0] for image in images)
    width = max(image.shape[1] for image in images)
    stack = np.stack([_pad_to(image, height, width) for image in images])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 255


def open_rgb(path) -> np.ndarray:
    """Return an image file as (H, W, 3) uint8: EXIF orientation applied, RGBA over white."""
    return picture_rgb(Image.open(path))


def picture_rgb(picture: Image.Image) -> np.ndarray:
    """Return an opened picture as (H, W, 3) uint8: EXIF orientation applied, RGBA over white."""
    image = ImageOps.exif_transpose(picture)
    if image.mode.startswith('I'):  # Pillow would clip 16-bit grey to white
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
    """Pad with white, the smaller half of the padding on top and left."""
    down, right = height - rgb.shape[0], width - rgb.shape[1]
    return np.pad(
        rgb,
        ((down // 2, down - down // 2), (right // 2, right - right // 2), (0, 0)),
        constant_values=255,
    )
