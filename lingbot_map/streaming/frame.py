"""Input and result of one image: the resized image, and its pose, depth and confidence."""

from dataclasses import dataclass
import time

from lingbot_map.geometry import decode_pose
from lingbot_map.models.windows import Outputs, Similarity
from lingbot_map.streaming.preprocess import PixelMap, resize_on_device, resize_pillow
import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class FrameInput:
    """An image at the network's size, on the device."""

    tag: object
    image: Tensor  # (3, h, w) uint8 on the device
    mapping: PixelMap
    preprocess_ms: float

    @classmethod
    def of(
        cls, rgb: np.ndarray, tag: object, mapping: PixelMap, device: torch.device
    ) -> 'FrameInput':
        """Upload an image (H, W, 3) uint8 and resize it according to `mapping`."""
        start = time.perf_counter()
        if device.type == 'cpu':
            pixels = resize_pillow(rgb, mapping).transpose(2, 0, 1).copy()
            image = torch.from_numpy(pixels)
        else:
            source = torch.from_numpy(np.require(rgb, requirements=('C', 'W'))).to(device)
            image = resize_on_device(source, mapping).contiguous()
        return cls(tag, image, mapping, 1e3 * (time.perf_counter() - start))

    @classmethod
    def noise(cls, mapping: PixelMap, device: torch.device) -> 'FrameInput':
        """Return a frame of random pixels for the warm-up."""
        pixels = torch.randint(0, 256, (3, *mapping.network_size[::-1]), dtype=torch.uint8)
        return cls(None, pixels.to(device), mapping, 0.0)


@dataclass(frozen=True)
class FrameResult:
    """Result for one image; its arrays are never overwritten."""

    tag: object  # passed by the caller with the image
    index: int  # number of the image since the last reset, from 0
    is_keyframe: bool
    T_world_cam: np.ndarray  # (4, 4) float64 camera-to-world, optical axes
    intrinsics: np.ndarray  # (3, 3) float64, pixels of the original image
    network_intrinsics: np.ndarray  # (3, 3) float64, pixels of depth, confidence and rgb
    depth: Tensor  # (h, w) float32 z-depth, on the engine's device
    confidence: Tensor  # (h, w) float32, at least 1, on the engine's device
    rgb: Tensor  # (h, w, 3) uint8, on the engine's device
    mapping: PixelMap
    timings_ms: dict[str, float]  # preprocess, forward


def results_of(
    frames: list[FrameInput],
    outputs: Outputs,
    move: Similarity,
    first: int,
    kept: bool,
    start_s: float,
) -> list[FrameResult]:
    """
    Wait for the device and return copies of the outputs (1, S, ...) for S frames.

    `move` maps the window's world frame to that of the sequence; `first` is the index of the first
    frame; `start_s` is the time when the forward pass began, by `time.perf_counter`.
    """
    pose_enc = outputs['pose_enc'][0].cpu().double()  # waits for the device
    forward_ms = 1e3 * (time.perf_counter() - start_s)
    width, height = frames[0].mapping.network_size
    T_world_cam, K = decode_pose(pose_enc, height, width)
    T_world_cam, K = move.move(T_world_cam).numpy(), K.numpy()
    depth = move.scale * outputs['depth'][0, ..., 0]
    confidence = outputs['depth_conf'][0].clone()
    return [
        FrameResult(
            frame.tag,
            first + i,
            kept,
            T_world_cam[i],
            frame.mapping.to_original(K[i]),
            K[i],
            depth[i],
            confidence[i],
            frame.image.permute(1, 2, 0),
            frame.mapping,
            {'preprocess': frame.preprocess_ms, 'forward': forward_ms / len(frames)},
        )
        for i, frame in enumerate(frames)
    ]
