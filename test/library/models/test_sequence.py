"""A masked pass over a whole clip gives the numbers of streaming it frame by frame."""

from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.train.attention import forward_sequence, visibility
import pytest
import torch

CONFIG = {
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
}


@pytest.mark.parametrize(
    ('scale_frames', 'anchors', 'window', 'interval'),
    [(1, 1, 2, 1), (3, 3, 2, 2), (4, 4, 16, 3), (2, 4, 1, 2), (4, 2, 3, 1)],
)
def test_masked_pass_equals_streaming(scale_frames, anchors, window, interval):
    torch.manual_seed(0)
    model = GCTStream.from_config(
        {**CONFIG, 'kv_cache_scale_frames': anchors, 'kv_cache_sliding_window': window}
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 0.3)
    images = torch.rand(1, 13, 3, 28, 42)
    streamed = model.inference_streaming(images, scale_frames, interval)
    seen = visibility(13, scale_frames, anchors, window, interval)
    with torch.no_grad():
        whole = forward_sequence(model, images, seen, scale_frames)
    for key in ('pose_enc', 'depth', 'depth_conf'):
        torch.testing.assert_close(whole[key], streamed[key], rtol=1e-4, atol=1e-5)
    # The comparison is worth something only if frames differ and depend on what they see.
    blind = visibility(13, scale_frames, anchors, window + 1, interval)
    with torch.no_grad():
        other = forward_sequence(model, images, blind, scale_frames)
    changed = (other['pose_enc'] - whole['pose_enc']).abs().max()
    assert changed > 1e-3 or window >= 13
