"""Memory that is too small is refused, or kept to, before anything fails; over DDS."""

from lingbot_map.settings import stream_config
from lingbot_map.streaming.budget import blank_model, GB, MemoryLimit, predict
from lingbot_map_ros.parameters import NodeParams
from node_rig import running
import numpy as np
import pytest
from rclpy.lifecycle import TransitionCallbackReturn
import torch

pytestmark = pytest.mark.usefixtures('ros', 'real_engine')
TINY = {'model': 'tiny', 'checkpoint': 'random', 'device': 'cpu', 'image_width': 56,
        'num_scale_frames': 2}  # fmt: skip


def gigabytes(height, **settings):
    """Return what images of 56 x `height` need."""
    config = stream_config(NodeParams.from_values(TINY | settings))
    return predict(blank_model('tiny', torch.float32), config, height, 56).total / GB


def send_noise(rig, *stamps_s, height=42):
    """Send images of 56 x `height` that differ, as those of a camera that moves."""
    for stamp_s in stamps_s:
        pixels = np.random.default_rng(int(stamp_s)).integers(0, 256, height * 56 * 3, np.uint8)
        rig.send(stamp_s, size=(56, height), data=pixels.tobytes())


def lines_with(capfd, text):
    return [line for line in capfd.readouterr().err.splitlines() if text in line]


def test_configure_says_in_one_line_what_is_needed(capfd):
    with running(**TINY):
        pass
    (line,) = lines_with(capfd, 'tokens per frame')
    assert f'56x42 pixels (18 tokens per frame) need {gigabytes(42):.2f} GB: weights' in line


def test_what_does_not_fit_is_refused_with_what_would(capfd):
    limit = (gigabytes(42, sliding_window=20) + gigabytes(42, sliding_window=21)) / 2
    with running(autostart=False, gpu_memory_limit=limit, **TINY) as rig:
        assert rig.node.trigger_configure() == TransitionCallbackReturn.FAILURE
        assert rig.node.pipeline is None
    (line,) = lines_with(capfd, 'configure failed')
    assert f'need {gigabytes(42):.2f} GB' in line
    assert line.endswith(
        f'{MemoryLimit(limit * 1e9, "gpu_memory_limit")}: sliding_window 20 would fit'
    )


def test_fit_memory_shrinks_and_says_what_it_chose(capfd):
    limit = gigabytes(42, sliding_window=24, max_keyframes=66) + 1 / GB
    with running(gpu_memory_limit=limit, fit_memory=True, **TINY) as rig:
        assert rig.diagnostic('max_keyframes') == '66'
        assert rig.node.pipeline.worker._engine._memory.shape.window == 24
        send_noise(rig, 1.0, 2.0, 3.0)
        rig.wait_counts(3, 3)
    log = capfd.readouterr().err
    assert log.count('going on with sliding_window 24, max_keyframes 66') == 1
    assert f'need {limit:.2f} GB' in log


@pytest.mark.parametrize('started', [True, False])
def test_square_images_where_only_flat_ones_fit_are_refused_one_by_one(started, capfd):
    limit = (gigabytes(42) + gigabytes(56)) / 2
    with running(gpu_memory_limit=limit, **TINY) as rig:
        if started:
            send_noise(rig, 1.0, 2.0, 3.0, height=28)
            rig.wait_counts(3, 3)
        before = 3 * started
        send_noise(rig, 4.0, 5.0, height=56)
        rig.wait_counts(before + 2, before, bad_image=2)
        send_noise(rig, 6.0, 7.0, height=28)  # the map goes on, or begins
        rig.wait_counts(before + 4, before + 2, bad_image=2)
        assert rig.diagnostic('map_number') == '0'
        assert rig.diagnostic('worker_errors') == '0'
    (line,) = lines_with(capfd, 'bad_image')
    assert '56x56 pixels (22 tokens per frame) need' in line and 'would fit' in line
