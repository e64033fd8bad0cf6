"""Reset, pause, flush and saving, also while an image is being processed."""

import errno
import itertools
import os
from pathlib import Path
import threading
from types import SimpleNamespace

from fake_engine import Gate
from lingbot_map.mapping.map_frame import MapFrame
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.frame import to_stamp
from lingbot_map_ros.output.conversions import pose_stamped
from lingbot_map_ros.output.publishing import PublishedMap
from lingbot_map_ros.output.saving import save_map, save_trajectory
from lingbot_map_ros.parameters import NodeParams
from lingbot_map_ros.services import _saved
from node_rig import running, to_time, WAIT_S
import numpy as np
from plyfile import PlyData
import pytest
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Header
from std_srvs.srv import SetBool

over_dds = pytest.mark.usefixtures('ros')


@over_dds
def test_nothing_of_the_old_map_is_published_once_reset_has_answered():
    gate, failing = Gate(at=3), Gate(at=5)

    def before_push(n):
        gate(n)
        failing(n)
        assert n != 5, 'of the old map'

    topics, engine = ('points', 'pose'), {'before_push': before_push}
    with running(topics, num_scale_frames=1, map__voxel_size=0.5, engine=engine) as rig:
        rig.send(1.0, 2.0, 3.0, 4.0)
        assert gate.reached.wait(20)
        rig.wait(lambda: rig.counts().received == 4)
        rig.wait_for('points', 2)  # a cloud that still waits would rightly be dropped
        assert rig.call('reset').success  # while image 3 is in the engine and 4 waits
        gate.open()
        rig.wait_counts(4, 2, reset=2)
        rig.send(5.0)
        rig.wait_counts(5, 3, reset=2)
        rig.call('flush')
        rig.wait_for('points', 3)
        for topic in ('odometry', 'pose', 'points', 'tf'):
            rig.wait_for(topic, 3)
            assert rig.stamps(topic) == [1, 2, 5], topic
        check_error_of_the_old_map(rig, failing)
        check_clouds_that_wait(rig)
        positions = [m.pose.pose.position.x for m in rig.heard['odometry']]
        assert positions == pytest.approx([0, 1, 0, 0, 1, 0], abs=1e-9)


def check_error_of_the_old_map(rig, gate):
    """Reset while image 5 of the engine is about to fail: the new map knows nothing of it."""
    rig.send(6.0)
    assert gate.reached.wait(WAIT_S)
    assert rig.call('reset').success
    fresh = rig.node.pipeline.session
    gate.open()
    rig.wait_counts(6, 3, reset=2, worker_error=1)
    rig.wait(lambda: rig.node.pipeline.worker.errors == 1)
    rig.call('flush')
    assert rig.node.pipeline.session is fresh
    assert (fresh.number, fresh.trouble) == (2, '')
    rig.send(7.0)
    rig.wait_counts(7, 4, reset=2, worker_error=1)
    assert rig.wait_for('odometry', 4)[3].pose.pose.position.x == pytest.approx(0)
    rig.wait_for('points', 4)


def check_clouds_that_wait(rig):
    """Reset while a cloud waits to be published: it goes neither out nor into the map."""
    started, opened = threading.Event(), threading.Event()
    outputs = rig.node.pipeline.outputs
    outputs._thread.hand('hold', lambda: (started.set(), opened.wait(WAIT_S)))
    assert started.wait(WAIT_S)
    rig.send(8.0)
    rig.wait_for('odometry', 5)
    rig.wait(lambda: {'points', 'map'} <= set(outputs._thread._tasks))
    assert rig.call('reset').success
    opened.set()
    rig.call('flush')
    assert len(rig.node.pipeline.session.points) == 0
    rig.send(9.0)
    rig.wait_for('points', 5)
    assert rig.stamps('points') == [1, 2, 5, 7, 9]
    rig.wait_for('odometry', 6)


@over_dds
def test_reset_drops_a_scale_batch_and_pause_keeps_the_map():
    with running(('path', 'map'), num_scale_frames=3, path__publish_rate=50.0) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait(lambda: rig.counts().received == 3)
        rig.call('flush')
        rig.wait(lambda: rig.heard['path'] and len(rig.heard['path'][-1].poses) == 3)
        assert rig.call('reset').success
        rig.wait(lambda: len(rig.heard['path'][-1].poses) == 0)
        rig.send(0.5, 0.75, frame_id='other_cam')  # of a new map: older, and of another camera
        rig.wait_for('processed', 5)
        assert rig.state() == 'INITIALIZING 2/3'
        assert rig.call('reset').success
        rig.wait_counts(5, 3, reset=2)
        assert rig.call('flush').message.startswith('0 images')
        rig.wait(lambda: rig.heard['map'][-1].width == 0)
        rig.send(11.0, 12.0, 13.0)
        rig.wait_counts(8, 6, reset=2)
        assert rig.call('pause', SetBool.Request(data=True)).success
        assert rig.state() == 'PAUSED'
        rig.send(14.0, 15.0)
        rig.wait_for('processed', 10)
        assert rig.counts().paused == 2
        assert rig.call('pause', SetBool.Request(data=False)).success
        rig.send(16.0)
        rig.wait_counts(9, 7, reset=2)
        positions = [m.pose.pose.position.x for m in rig.wait_for('odometry', 7)[3:]]
        assert positions == pytest.approx([0, 1, 2, 3], abs=1e-9)
        assert rig.stamps('odometry')[3:] == [11, 12, 13, 16]


@over_dds
def test_a_flush_waits_for_what_was_sent_before_it_alone_and_a_reset_for_no_flush():
    failing, second, third = Gate(at=1), Gate(at=3), Gate(at=4)

    def before_push(n):
        for gate in (failing, second, third):
            gate(n)
        if n == 1:
            raise RuntimeError('the device is unhappy')

    with running(num_scale_frames=4, engine={'before_push': before_push}) as rig:
        # An image that fails before a flush does not spoil it.
        rig.send(1.0, 2.0)
        rig.wait(lambda: rig.counts().received == 2)
        flushed = flush_at(rig, failing)
        failing.open()
        rig.wait(flushed.done)
        assert flushed.result().message.startswith('1 images')
        rig.wait_counts(2, 1, worker_error=1)
        # A reset is answered while a flush waits for the engine.
        rig.send(3.0)
        flushed = flush_at(rig, second)
        assert rig.call('reset').success
        assert not flushed.done()
        second.open()
        rig.wait(flushed.done)
        assert flushed.result().success
        rig.wait_counts(3, 1, worker_error=1, reset=1)
        # Images that come later are not waited for: a fast camera would never let it end.
        rig.send(4.0)
        flushed, engine = flush_at(rig, third), rig.engine
        rig.send(*range(5, 65))
        rig.wait(lambda: rig.counts().received == 64)
        flush, pushed = engine.flush, []
        engine.flush = lambda: pushed.append(engine.pushed) or flush()
        third.open()
        rig.wait(flushed.done)
        assert flushed.result().success
        assert pushed == [5]  # the image that was under way when it was asked for, and the next
        rig.wait_counts(64, 62, worker_error=1, reset=1)
        # A flush that fails says why.
        assert rig.call('reset').success
        rig.send(65.0)
        rig.wait_for('processed', 65)
        engine.flush = lambda: 1 / 0
        answer = rig.call('flush')
        assert not answer.success
        assert 'division' in answer.message
        rig.wait_counts(65, 62, worker_error=2, reset=1)


def flush_at(rig, gate):
    """Return the future of a flush that was asked for while the engine was held at a gate."""
    assert gate.reached.wait(WAIT_S)
    flushed = rig.request_later('flush')
    rig.wait(lambda: rig.node.pipeline.worker._flushes)
    return flushed


@over_dds
def test_saving_writes_whole_files_and_answers_with_their_paths(tmp_path):
    folder, autosaved = tmp_path / 'new' / 'folder', tmp_path / 'autosaved'
    folders = {'save_directory': str(folder), 'autosave': str(autosaved)}
    with running(num_scale_frames=1, **folders) as rig:
        for name in ('save_map', 'save_trajectory'):
            answer = rig.call(name)
            assert (answer.success, 'nothing was written' in answer.message) == (False, True)
        assert not folder.exists()
        rig.send(1.5, 2.5)
        rig.wait_counts(2, 2)
        rig.call('flush')
        saved_map, saved_trajectory = rig.call('save_map'), rig.call('save_trajectory')
        assert saved_map.success
        assert saved_trajectory.success
        # Cleaning up saves what it forgets.
        assert list(autosaved.iterdir()) == []
        assert rig.node.trigger_deactivate() == rig.node.trigger_cleanup()
        assert rig.node.pipeline is None
        assert {path.suffix for path in autosaved.iterdir()} == {'.ply', '.pcd', '.tum'}
        for name in ('reset', 'flush', 'pause', 'save_map', 'save_trajectory'):
            answer = rig.call(name)
            assert not answer.success
            assert 'configure' in answer.message
    ply, pcd = map(Path, saved_map.message.split(', '))
    vertices = PlyData.read(ply)['vertex']
    assert len(vertices['x']) > 0
    assert vertices['x'].min() >= 2 - 1e-5
    rows = np.loadtxt(saved_trajectory.message)
    np.testing.assert_allclose(rows[:, 0], [1.500000007, 2.500000007], atol=1e-9)
    expected = [[i, 0, 0, -0.5, 0.5, -0.5, 0.5] for i in (0, 1)]
    np.testing.assert_allclose(rows[:, 1:], expected, atol=1e-9)
    header, points = pcd.read_bytes().split(b'DATA binary\n')
    assert f'POINTS {len(vertices["x"])}'.encode() in header
    np.testing.assert_array_equal(np.frombuffer(points, POINT_DTYPE)['x'], vertices['x'])
    assert {path.suffix for path in folder.iterdir()} == {'.ply', '.pcd', '.tum'}
    assert pcd.parent == folder


def pipeline_with(directory, count):
    """Return what a service needs of a pipeline whose map has `count` poses and points."""
    params = NodeParams.from_values({'save_directory': str(directory)})
    published, frame = PublishedMap(0, params), MapFrame(1.0)
    for i in range(count):
        pose = frame.pose(np.eye(4))
        published.trajectory.append(pose_stamped(Header(stamp=to_stamp(i + 1)), pose), pose)
        published.insert(to_stamp(i + 1), np.ones(1, POINT_DTYPE))
    return SimpleNamespace(params=params, outputs=SimpleNamespace(current=published))


@pytest.mark.parametrize('save', [save_map, save_trajectory])
@pytest.mark.parametrize('directory', ['/proc/sub', '~no-such-user/sub'])
def test_saving_without_content_or_folder_gives_the_reason(directory, save):
    success, message = _saved(pipeline_with(directory, 0), save)
    assert (success, 'nothing was written' in message) == (False, True)
    success, message = _saved(pipeline_with(directory, 1), save)
    assert (success, 'save_directory' in message) == (False, True)


@pytest.mark.parametrize('save', [save_map, save_trajectory])
def test_a_disk_that_is_full_leaves_no_half_a_file(save, tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pipeline = pipeline_with(tmp_path, 1)
    with monkeypatch.context() as full:
        full.setattr(os, 'fsync', fail)
        success, message = _saved(pipeline, save)
    assert not success
    assert 'No space left' in message
    assert str(tmp_path) in message
    assert 'make room' in message
    assert list(tmp_path.iterdir()) == []
    success, message = _saved(pipeline, save)
    assert success and all(Path(file).is_file() for file in message.split(', '))


@over_dds
def test_services_answer_while_a_frame_runs_and_the_clock_ticks_a_thousand_times_a_second(
    tmp_path,
):
    gate, over, ticks = Gate(at=2), threading.Event(), itertools.count()
    with running(
        num_scale_frames=1,
        use_sim_time=True,
        queue='latest',
        save_directory=str(tmp_path),
        engine={'before_push': gate},
    ) as rig:
        rig.send(1.0)
        rig.wait_counts(1, 1)
        clock, now = rig.publisher(Clock, '/clock', 1), 0

        def play():
            nonlocal now
            for now in ticks:
                clock.publish(Clock(clock=to_time(2 + now / 1000)))
                rig.send(2 + now / 1000)
                if over.wait(0.001):
                    return

        player = threading.Thread(target=play)
        player.start()
        try:
            assert gate.reached.wait(WAIT_S)
            seen, reports = rig.counts().received, len(rig.heard['diagnostics'])
            taken = []
            for _ in range(10):
                for ask in (
                    lambda: rig.call('pause', SetBool.Request(data=False)).success,
                    lambda: rig.set_parameter('points.stride', 2).successful,
                    lambda: rig.call('save_trajectory').success,
                ):
                    begun = now
                    assert ask()
                    taken.append(now - begun)
            # In ticks, since a busy machine slows down the clock as well: 100 ms where it is idle.
            assert np.median(taken) < 100, taken
            rig.wait(lambda: rig.counts().received > seen)
            rig.wait_for('diagnostics', reports + 2)  # timers are not starved either
            assert not rig.heard['odometry'][1:]  # the frame has run all the time
        finally:
            over.set()
            player.join()
            gate.open()
