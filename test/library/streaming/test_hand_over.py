"""When the next window takes over, and that its warm-up leaves no trace."""

import logging

from fake_network import FakeModel
from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.roll_over import NextWindow
import pytest
from test_roll_over import assert_true, engine_for, run


@pytest.mark.parametrize('interval', [1, 3])  # the following frame is a keyframe, or is none
@pytest.mark.parametrize(
    ('overlap', 'extra'),
    [(6, [[7]]), (4, [[4, 5, 6, 7]])],  # counted in keyframes after the scale batch
    ids=['one frame', 'scale batch'],
)
def test_the_frame_after_the_full_memory_takes_over(interval, overlap, extra, caplog):
    caplog.set_level(logging.INFO)
    model = FakeModel()
    engine = engine_for(model, keyframe_interval=interval, overlap_keyframes=overlap)
    first = len(model.moves)
    last = 4 + 7 * interval  # that fills the memory
    results = run(engine, range(last + 1))
    extra = [[4 + n * interval for n in numbers] for numbers in extra]
    assert model.frames[-2:] == [[last], *extra]  # the next window's last pass
    assert engine._next.complete and not caplog.records
    assert (engine.window, engine.keyframes, engine.held_keyframes) == (0, 12, 12)

    model.frames.clear()
    results += run(engine, [last + 1])
    kept = int(interval == 1)
    assert results[-1].is_keyframe == bool(kept) and model.frames == [[last + 1]]
    assert not engine._next.complete and engine.last_residual < 1e-4
    assert (engine.window, engine.keyframes) == (1, 12 + kept)
    assert engine.held_keyframes == overlap + kept
    results += run(engine, [last + 2])
    assert [m.split(' continues')[0] for m in caplog.messages] == ['window 1']
    assert_true(results, model.moves[first])


def test_a_flush_at_the_full_memory_leaves_the_take_over_to_the_next_frame():
    model = FakeModel()
    engine = engine_for(model)
    first = len(model.moves)
    results = run(engine, range(12))
    assert engine.flush() == [] and engine._next.complete
    assert (engine.window, engine.held_keyframes) == (0, 12)
    results += run(engine, [12])
    assert engine.window == 1
    assert_true(results, model.moves[first])


def test_a_reset_at_the_full_memory_forgets_the_next_window(caplog):
    caplog.set_level(logging.INFO)
    model = FakeModel()
    engine = engine_for(model)
    run(engine, range(12))
    engine.reset()
    assert not engine._next.complete and engine._next.memory.kept == 0
    first = len(model.moves)
    results = run(engine, range(12))
    assert (engine.window, engine.keyframes) == (0, 12) and not caplog.records
    results += run(engine, range(12, 15))
    assert engine.window == 1 and len(caplog.records) == 1
    assert_true(results, model.moves[first])


def say_nothing(index, outputs, window):
    for each in outputs.values():
        each.fill_(float('nan'))


@pytest.mark.parametrize('spoil', [lambda *_: None, say_nothing], ids=['truth', 'nonsense'])
@pytest.mark.parametrize('mode', ['off', 'default'])  # 'default' warms up until frames are evicted
@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'overlap_keyframes': 2},
        {'overlap_keyframes': 1, 'num_scale_frames': 1, 'max_keyframes': 2},
        {'sliding_window': 20},  # full before a frame goes
    ],
    ids=str,
)
def test_a_warm_up_tells_nothing_and_leaves_nothing(settings, mode, spoil, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    taken_over = []
    monkeypatch.setattr(StreamEngine, '_roll_over', taken_over.append)
    model = FakeModel(spoil)
    model.compile_mode = mode
    engine = engine_for(model, keyframe_interval=2, **settings)
    assert not caplog.records and not taken_over
    assert (engine.window, engine.last_scale_step, engine.last_residual) == (0, 1, 0)
    assert engine.frames == engine.waiting == engine.keyframes == engine.held_keyframes == 0
    assert engine.gated_frames == 0 and not engine.is_static and engine.keyframe_interval == 2
    assert engine._memory.kept == engine._next.memory.kept == 0
    assert not engine._next.complete


def test_a_warm_up_runs_a_whole_overlap_and_its_alignment(monkeypatch):
    model, join, joined = FakeModel(), NextWindow.join, []

    def listen(self, move):
        joined.append((self.memory.kept, join(self, move)))
        return joined[-1][1]

    monkeypatch.setattr(NextWindow, 'join', listen)
    engine_for(model)
    assert [len(each) for each in model.frames[-3:]] == [4, 1, 1]
    ((kept, seam),) = joined
    assert kept == 6 and seam.consistent and seam.scale_step == pytest.approx(1)
