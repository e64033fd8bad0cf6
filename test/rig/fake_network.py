"""
A network that knows the truth and shows it in a world frame that every scale batch draws anew.

Which one that was is kept in the camera head's memory alone, so it has to survive a hand-over.
"""

from lingbot_map.geometry import matrix_to_quaternion, quaternion_to_matrix
from lingbot_map.models.memory import MemoryShape, StreamMemory
import numpy as np
import torch

HEIGHT, WIDTH = 28, 42


def true_poses(index):
    """Return camera-to-world rotations (S, 3, 3) and centres (S, 3) of a winding path."""
    a = index.double()
    q = torch.stack((0.3 * (a / 7).sin(), 0.4 * (a / 11).cos(), 0.1 * (a / 5).sin()), -1)
    c = torch.stack((2 * (a / 9).sin(), 0.3 * (a / 4).cos(), a / 10), -1)
    return quaternion_to_matrix(torch.cat((q, torch.ones_like(q[:, :1])), -1)), c


def true_depth(index):
    """Return the depth (S, H, W) of a wall at z = 30, far from the whole path."""
    R, c = true_poses(index)
    v, u = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing='ij')
    focal = WIDTH / 2
    rays = torch.stack(
        ((u - WIDTH / 2) / focal, (v - HEIGHT / 2) / focal, torch.ones(u.shape)), -1
    )
    forward = torch.einsum('si,hwi->shw', R[:, 2], rays.double())
    return (30 - c[:, 2])[:, None, None] / forward


def image_of(index):
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0], image[..., 1] = index % 256, index // 256
    return image


class FakeModel:
    """
    What the engine needs of a GCTStream.

    `spoil(index, outputs, window)` may damage what it says of frames in a window.
    """

    patch_size = 14
    camera_head = depth_head = 'there'
    compile_mode, attention_backend = 'off', 'sdpa'

    def __init__(self, spoil=lambda index, outputs, window: None):
        self.frames = []  # that were passed to each call
        self.scale_frames = 0  # `num_frame_for_scale` of the newest call
        self.moves = []  # scale, R and t from each window's world frame to the truth's
        self._spoil = spoil

    def new_memory(self, height, width, max_keyframes):
        shape = MemoryShape(
            layers=1, heads=1, head_dim=2, patches=6, specials=1,
            anchors=self.kv_cache_scale_frames, window=self.kv_cache_sliding_window,
            max_keyframes=max_keyframes, camera_iterations=1, camera_depth=1, camera_heads=1,
            camera_head_dim=2)  # fmt: skip
        return StreamMemory(shape, torch.device('cpu'), torch.float32)

    def stream(self, images, memory, scale_frames):
        pixels = (images[0, :, :2, 0, 0] * 255).round().long()
        index = pixels[:, 0] + 256 * pixels[:, 1]
        self.frames.append(index.tolist())
        self.scale_frames = scale_frames
        window = self._window(memory, len(index))
        scale, R, t = self.moves[window]
        R_true, c = true_poses(index)
        pose = torch.cat(((c - t) @ R / scale, matrix_to_quaternion(R.T @ R_true)), -1)
        fov = 2 * torch.tensor([[HEIGHT / WIDTH, 1.0]]).atan().repeat(len(index), 1)
        depth = (true_depth(index) / scale)[None, ..., None].float()
        outputs = {
            'pose_enc': torch.cat((pose, fov), -1)[None].float(),
            'depth': depth,
            'depth_conf': torch.ones_like(depth[..., 0]),
        }
        self._spoil(index, outputs, window)
        return outputs

    def _window(self, memory, frames):
        """Return the number of the window, as the attention to its first frame gives it."""
        opens = memory.kept == 0
        if opens:
            torch.manual_seed(len(self.moves))
            R = quaternion_to_matrix(torch.randn(4, dtype=torch.float64))
            t = torch.randn(3, dtype=torch.float64)
            self.moves.append((0.5 + 1.5 * torch.rand(()).item(), R, t))
        number = float(len(self.moves) - 1) if opens else -1.0
        key = torch.tensor([100.0 if opens else -100.0, 0]).expand(1, 1, frames, 2)
        value = torch.full((1, 1, frames, 2), number)
        return int(memory.attend_camera(0, 0, torch.ones_like(key), key, value)[0, 0, 0, 0])


def truth_in_window(move, index):
    scale, R, t = move
    R_true, c = true_poses(index)
    T = torch.eye(4, dtype=torch.float64).repeat(len(index), 1, 1)
    T[:, :3, :3], T[:, :3, 3] = R.T @ R_true, (c - t) @ R / scale
    return T.numpy(), true_depth(index) / scale
