"""Model presets and the settings of a stream."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lingbot_map.errors import UserError

COMPILE_MODES = ('auto', 'off', 'default', 'reduce-overhead', 'max-autotune', 'cuda-graph')
ATTENTION_BACKENDS = ('auto', 'sdpa', 'cudnn', 'flash', 'triton', 'flashinfer')
HEADS_DTYPES = ('tf32', 'fp32', 'bf16')
DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
KEYFRAME_POLICIES = ('interval', 'flow', 'auto')
LIMIT_POLICIES = ('roll_over', 'reset', 'stop')

# Arguments of GCTStream.from_config. `full` is the released network; its checkpoints have no point
# head. `demo` is trained on rendered rooms and comes with the package. `tiny` is for tests.
MODEL_PRESETS = {
    'full': {'enable_3d_rope': True},
    'demo': {
        'embed_dim': 192,
        'num_heads': 3,
        'depth': 6,
        'selected_layers': (1, 3, 4, 5),
        'img_size': 168,
        'vit_depth': 1,
        'vit_num_heads': 3,
        'mlp_ratio': 3.0,
        'enable_3d_rope': True,
        'camera_trunk_depth': 0,
        'camera_num_iterations': 2,
        'dpt_features': 32,
        'dpt_out_channels': (32, 32, 48, 48),
    },
    'tiny': {
        'embed_dim': 128,
        'num_heads': 2,
        'depth': 4,
        'selected_layers': (0, 1, 2, 3),
        'img_size': 56,
        'vit_depth': 1,
        'vit_num_heads': 2,
        'enable_3d_rope': True,
        'camera_trunk_depth': 1,
        'camera_num_heads': 2,
        'camera_num_iterations': 2,
        'dpt_features': 32,
        'dpt_out_channels': (32, 32, 32, 32),
        'max_frame_num': 256,
    },
}
# Width of the network input that a preset was made for [px].
PRESET_IMAGE_WIDTH = {'full': 518, 'demo': 168, 'tiny': 84}
# How the `demo` preset was trained and is evaluated.
DEMO_STREAM = {
    'num_scale_frames': 8,
    'sliding_window': 16,
    'keyframe_interval': 2,
    'image_width': 168,
}


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a StreamEngine; the node's parameters have the same names."""

    num_scale_frames: int = 8  # frames in the scale batch, and anchors that are never evicted
    sliding_window: int = 64  # newest kept frames whose patches are attended to
    max_keyframes: int = 320  # frames that the memory can keep; training saw up to 320 views
    # When they are kept: 'roll_over' goes on in a new window that the last overlap_keyframes open,
    # in the same map frame; 'reset' starts a new sequence; 'stop' raises StreamLimitError.
    on_limit: str = 'roll_over'
    overlap_keyframes: int = 8
    # 'interval': every n-th frame after the scale batch is kept; 'flow': those that the camera
    # moved for; 'auto': every n-th, so that expected_frames do not exceed max_keyframes.
    keyframe_policy: str = 'interval'
    keyframe_interval: int = 1
    flow_threshold: float = 20.0  # mean flow since the last keyframe [px of the network input]
    max_non_keyframe_gap: int = 30  # frames after which one is kept whatever the flow
    expected_frames: int = 0  # length of the run
    # Images that show no motion since the last one that did neither enter the scale batch nor
    # become keyframes. Motion: how far the scene moves in the image [% of its width].
    motion_gate: bool = False
    motion_threshold: float = 0.5
    image_width: int = 518  # width of the network input [px], a multiple of the patch size

    def __post_init__(self):
        for name, least in (
            ('num_scale_frames', 1),
            ('sliding_window', 0),
            ('max_keyframes', 1),
            ('keyframe_interval', 1),
            ('image_width', 1),
            ('max_non_keyframe_gap', 1),
            ('expected_frames', 0),
            ('overlap_keyframes', 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"'{name}' is {value}; it must be at least {least}")
        if self.max_keyframes < self.num_scale_frames:
            raise UserError(
                f"'max_keyframes' is {self.max_keyframes}, less than num_scale_frames "
                f'({self.num_scale_frames}); raise it'
            )
        if not self.motion_threshold > 0:
            raise UserError(f"'motion_threshold' is {self.motion_threshold}; it must be above 0 %")
        self._check_limit_policy()
        self._check_keyframe_policy()

    def _check_limit_policy(self):
        if self.on_limit not in LIMIT_POLICIES:
            raise UserError(f"'on_limit' is '{self.on_limit}'; use {', '.join(LIMIT_POLICIES)}")
        # Every frame of an overlap has to be one that came after the window had opened.
        needed = self.overlap_keyframes + max(self.overlap_keyframes, self.num_scale_frames)
        if self.on_limit == 'roll_over' and self.max_keyframes < needed:
            raise UserError(
                f"'max_keyframes' is {self.max_keyframes}; to roll over with 'overlap_keyframes' "
                f"{self.overlap_keyframes} and 'num_scale_frames' {self.num_scale_frames} it must "
                f"be at least {needed}: raise it, or set 'on_limit' to reset or stop"
            )

    def _check_keyframe_policy(self):
        if self.keyframe_policy not in KEYFRAME_POLICIES:
            raise UserError(
                f"'keyframe_policy' is '{self.keyframe_policy}'; "
                f'use {", ".join(KEYFRAME_POLICIES)}'
            )
        if self.keyframe_policy == 'flow' and not self.flow_threshold > 0:
            raise UserError(
                f"'flow_threshold' is {self.flow_threshold}; "
                'it must be above 0 px for keyframes by flow'
            )
        if self.keyframe_policy == 'auto' and not self.expected_frames:
            raise ValueError(
                "'keyframe_policy' is 'auto', which needs 'expected_frames': "
                'the number of images of the run'
            )
        if self.keyframe_policy == 'auto' and self.max_keyframes == self.num_scale_frames:
            raise ValueError(
                "'keyframe_policy' is 'auto', which needs 'max_keyframes' above "
                f"'num_scale_frames' ({self.num_scale_frames})"
            )


def demo_checkpoint() -> Path:
    """Return where the packaged weights of the `demo` preset are."""
    return Path(str(files('lingbot_map') / 'data' / 'demo.safetensors'))
