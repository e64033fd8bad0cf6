"""Model presets, and the choices of settings."""

from importlib.resources import files
from pathlib import Path

COMPILE_MODES = ('auto', 'off', 'default', 'reduce-overhead', 'max-autotune', 'cuda-graph')
ATTENTION_BACKENDS = ('auto', 'sdpa', 'cudnn', 'flash', 'triton', 'flashinfer')
HEADS_DTYPES = ('tf32', 'fp32', 'bf16')
DTYPES = ('auto', 'float32', 'bfloat16', 'float16')
KEYFRAME_POLICIES = ('interval', 'flow')
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


def demo_checkpoint() -> Path:
    """Return where the packaged weights of the `demo` preset are."""
    return Path(str(files('lingbot_map') / 'data' / 'demo.safetensors'))
