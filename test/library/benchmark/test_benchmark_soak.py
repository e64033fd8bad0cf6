"""Two thousand frames with roll-over through the network: memory is flat, windows follow."""

import json
import logging

from lingbot_map.benchmark.__main__ import main
from lingbot_map.benchmark.soak import held_bytes, Part, resident_bytes, Soak, soak_lines
import pytest
import torch

SMALL = ['--model', 'tiny', '--image-width', '56', '--image-height', '42', '--device', 'cpu',
         '--num-scale-frames', '2', '--sliding-window', '4', '--max-keyframes', '64']  # fmt: skip


def part(last_frame, is_full, ms, mb):
    return Part(last_frame, is_full, ms, ms, ms, mb, mb, int(is_full))


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_frames(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    file = tmp_path / 'soak.json'
    assert main([*SMALL, '--soak', '2000', '--json', str(file)]) == 0
    found = json.loads(file.read_text())['soak']
    parts = found['parts']
    assert [each['last_frame'] for each in parts[:9:4]] == [201, 1000, 1799]
    assert parts[-1]['last_frame'] == 1999
    # A window of 64 that begins with 8 of the one before is full again after 56 frames.
    assert parts[-1]['window'] == (2000 - 8) // 56 == 35
    assert parts[0]['window'] < parts[4]['window'] < parts[-1]['window']
    # The first part begins with an empty window, though it ends after three roll-overs.
    assert [each['is_full'] for each in parts] == [False] + 9 * [True]
    assert found['recompiles'] == 0
    tensors = [each['tensors_mb'] for each in parts[1:]]
    # Between two roll-overs up to 8 frames wait for the next window, with poses and depth.
    waiting_mb = 8 * 3 * (56 * 42 * 4 + 1000) / 1e6
    assert max(tensors) - min(tensors) < waiting_mb, tensors
    resident = [each['resident_mb'] for each in parts]
    assert max(resident[5:]) - resident[5] < 10, resident


def test_a_leak_would_show():
    before = held_bytes(torch.device('cpu'))
    leak = [torch.ones(1000, 1000) for _ in range(3)]
    views = [each[:10] for each in leak]
    assert held_bytes(torch.device('cpu')) - before == 12e6
    del leak, views
    assert held_bytes(torch.device('cpu')) == before
    assert 1e7 < resident_bytes() < 1e11


def test_slopes_are_those_of_the_parts_with_a_full_window():
    found = Soak([part(499, False, 1, 1), part(999, True, 10, 50), part(1499, True, 11, 50),
                  part(1999, True, 12, 50)], recompiles=4)  # fmt: skip
    assert found.slope('forward_ms') == pytest.approx(2.0)
    assert found.slope('tensors_mb') == pytest.approx(0.0)
    assert found.growth('forward_ms') == pytest.approx(1.2)
    lines = soak_lines(found)
    assert [line.split()[0] for line in lines[1:5]] == ['499', '999', '1499', '1999']
    assert 'compilations since READY: 4' in lines
    assert any(line.split()[:2] == ['network', '+2.0000'] for line in lines)


def test_too_few_frames_have_no_slope(capsys):
    assert main([*SMALL, '--soak', '7']) == 0
    out = capsys.readouterr().out
    assert 'too few frames with a full window to tell slopes' in out
    assert [line.split()[0] for line in out.splitlines()[-7:-2]] == ['2', '3', '4', '5', '6']
