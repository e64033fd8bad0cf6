"""How the node's network runs: set by parameter, shown in diagnostics, nothing compiled later."""

import os

from lingbot_map.settings import ParameterError
from lingbot_map.streaming.loading import load_engine
from lingbot_map_ros.parameters import NodeParams
from node_rig import running
import numpy as np
import pytest
import torch

# The sizes of test_compiling.py, so that torch finds that code in its cache.
TINY = {'model': 'tiny', 'checkpoint': 'random', 'device': 'cpu', 'image_width': 84}
SIZE = (84, 56)


@pytest.mark.slow
def test_diagnostics_show_the_compile_mode_and_that_nothing_is_compiled_once_ready(
    ros, real_engine
):
    noise = np.random.default_rng(0).integers(0, 256, (12, 56 * 84 * 3), dtype=np.uint8)
    with running(compile_mode='default', num_scale_frames=3, sliding_window=2, max_keyframes=40,
                 on_limit='stop', keyframe_interval=2, **TINY) as rig:  # fmt: skip
        for i, pixels in enumerate(noise):
            rig.send(1.0 + i, size=SIZE, data=pixels.tobytes())
        rig.wait_counts(12, 12)
        assert rig.diagnostic('keyframes') == '8'  # the others ran as well, and some were evicted
        told = {v.key: v.value for v in rig.heard['diagnostics'][-1].status[0].values}
        expected = {'compile_mode': 'default', 'attention_backend': 'sdpa', 'recompiles': '0',
                    'worker_errors': '0'}  # fmt: skip
        assert {key: told[key] for key in expected} == expected
        torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))
        assert rig.diagnostic('recompiles') == '1'  # what is compiled later is counted


def test_modes_that_the_device_cannot_run_are_refused_by_name():
    def load(**values):
        return load_engine(NodeParams.from_values(TINY | values))

    with pytest.raises(ParameterError, match=r"parameter 'compile_mode' is 'cuda-graph', which"):
        load(compile_mode='cuda-graph')
    with pytest.raises(ParameterError, match=r"parameter 'attention_backend' is 'cudnn', which"):
        load(attention_backend='cudnn')
    assert load().compile_mode == 'off'


def test_the_settings_reach_the_network(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', '')
    monkeypatch.setenv('TRITON_CACHE_DIR', '')
    values = {'heads_dtype': 'bf16', 'compile_cache_dir': str(tmp_path / 'cache')}
    engine = load_engine(NodeParams.from_values(TINY | values))
    head = engine._model.depth_head
    assert head.projects[0].weight.dtype == torch.bfloat16
    assert head.scratch.output_conv2[0].weight.dtype == torch.float32
    assert os.environ['TORCHINDUCTOR_CACHE_DIR'] == str(tmp_path / 'cache')
    plain = load_engine(NodeParams.from_values(TINY))
    assert plain._model.depth_head.projects[0].weight.dtype == torch.float32
