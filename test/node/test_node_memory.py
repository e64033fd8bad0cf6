"""Memory that is too small is refused, or kept to, before anything fails."""

import logging

from lingbot_map.errors import UserError
from lingbot_map.settings import stream_config
from lingbot_map.streaming.budget import blank_model, GB, MemoryLimit, MemoryLimitError, predict
from lingbot_map.streaming.loading import load_engine
from lingbot_map_ros.parameters import NodeParams
from node_rig import running
import numpy as np
import pytest
import torch

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


def test_what_does_not_fit_is_refused_with_what_would():
    limit = (gigabytes(42, sliding_window=20) + gigabytes(42, sliding_window=21)) / 2
    with pytest.raises(MemoryLimitError) as caught:
        load_engine(NodeParams.from_values(TINY | {'gpu_memory_limit': limit}))
    line = str(caught.value)
    assert isinstance(caught.value, UserError)  # the transition fails with this line
    assert '\n' not in line and f'need {gigabytes(42):.2f} GB' in line
    assert line.endswith(
        f'{MemoryLimit(limit * 1e9, "gpu_memory_limit")}: sliding_window 20 would fit'
    )


def test_without_a_limit_one_line_says_what_is_needed(caplog):
    with caplog.at_level(logging.INFO, 'lingbot_map'):
        load_engine(NodeParams.from_values(TINY))
    (line,) = (r.getMessage() for r in caplog.records if 'tokens per frame' in r.getMessage())
    assert f'56x42 pixels (18 tokens per frame) need {gigabytes(42):.2f} GB: weights' in line


@pytest.mark.usefixtures('ros', 'real_engine')
def test_a_node_shrinks_to_the_limit_and_refuses_larger_images_one_by_one(capfd):
    limit = gigabytes(42, sliding_window=24, max_keyframes=66) + 1 / GB
    with running(gpu_memory_limit=limit, fit_memory=True, **TINY) as rig:
        assert rig.diagnostic('max_keyframes') == '66'
        assert rig.node.pipeline.worker._engine._memory.shape.window == 24
        log = capfd.readouterr().err
        assert log.count('going on with sliding_window 24, max_keyframes 66') == 1
        (line,) = (line for line in log.splitlines() if 'tokens per frame' in line)
        assert f'56x42 pixels (18 tokens per frame) need {limit:.2f} GB: weights' in line
        send_noise(rig, 1.0, 2.0, height=56)
        rig.wait_counts(2, 0, bad_image=2)
        send_noise(rig, 3.0, 4.0, 5.0, height=28)  # the map begins
        rig.wait_counts(5, 3, bad_image=2)
        send_noise(rig, 6.0, 7.0, height=56)
        rig.wait_counts(7, 3, bad_image=4)
        send_noise(rig, 8.0, 9.0, height=28)  # and goes on
        rig.wait_counts(9, 5, bad_image=4)
        assert rig.diagnostic('map_number') == '0'
        assert rig.diagnostic('worker_errors') == '0'
    (line,) = (line for line in capfd.readouterr().err.splitlines() if 'bad_image' in line)
    assert '56x56 pixels (22 tokens per frame) need' in line and 'would fit' in line
