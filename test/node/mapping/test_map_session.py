"""One map as an object, without ROS: its state, its scale, where results are."""

from dataclasses import replace
from types import SimpleNamespace

from fake_engine import DEPTH, FakeEngine, STEP
from lingbot_map_ros.frame import BAD_POSE, Dropped, Frame, to_stamp
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.mapping.engine_status import Progress
from lingbot_map_ros.mapping.ledger import Ledger
from lingbot_map_ros.mapping.map_session import MapSession, State
from lingbot_map_ros.parameters import NodeParams
import numpy as np
import pytest

S = 1_000_000_000
RGB = np.full((42, 56, 3), 128, np.uint8)


def params(**values):
    return NodeParams.from_values({'base_frame': '', 'num_scale_frames': 2, **values})


def session(number=0, kind=MapSession, **values):
    """Return a session of a camera without robot, which needs neither transforms nor odometry."""
    of_node = params(**values)
    counts = Ledger(None).counts()
    return kind(number, of_node, Admission(of_node), counts, None, None)


def results(count):
    """Return the frames and results of a camera that moves by STEP along its optical axis."""
    engine = FakeEngine(params())
    frames = [Frame(None, to_stamp((i + 1) * S), 'cam', 0.0) for i in range(count)]
    return [(r.tag, r) for frame in frames for r in engine.push(RGB, frame)]


def place(session, frame, result):
    assert session.estimate_scale(frame, result) is None
    return session.place(result)


def test_a_map_initializes_then_tracks():
    fresh = session()
    assert (fresh.state, fresh.is_initialized, fresh.trouble) == (State.INITIALIZING, False, '')
    fresh.progress = Progress(is_static=True)
    assert fresh.state is State.WAITING_FOR_MOTION
    fresh.end_batch()  # of images that gave no pose
    assert (fresh.state, fresh.initialized_s) == (State.WAITING_FOR_MOTION, float('inf'))
    fresh.is_initialized = True
    fresh.end_batch()
    assert fresh.state is State.TRACKING
    began_s = fresh.initialized_s
    fresh.end_batch()
    assert fresh.initialized_s == began_s < float('inf')


def test_results_are_placed_in_map_units():
    scaled = session(scale=2.5)
    (_, _), (frame, result) = pair = results(2)
    place(scaled, *pair[0])
    placement, scene = place(scaled, frame, result)
    np.testing.assert_allclose(
        placement.frame.camera.T_map_body[:3, 3], (2.5 * STEP, 0, 0), atol=1e-9
    )
    assert set(placement.frame.depth.ravel().tolist()) == {2.5 * DEPTH}
    assert scene.depth == pytest.approx(2.5 * DEPTH)
    assert (placement.body_frame, placement.is_scaled) == ('cam', True)
    assert placement.missing_extrinsics == ''
    assert scaled.scale_status == '2.5'


def test_each_map_begins_at_its_own_first_image():
    (first, second) = results(2)
    for frame, result in (first, second):
        placement, _ = place(session(), frame, result)
        np.testing.assert_allclose(placement.frame.camera.T_map_body[:3, 3], 0, atol=1e-12)


@pytest.mark.parametrize('field', ['T_world_cam', 'network_intrinsics'])
def test_a_result_that_is_not_finite_is_dropped_and_the_next_one_placed(field):
    current, ((frame, result), second) = session(), results(2)
    broken = replace(result, **{field: np.full_like(getattr(result, field), np.nan)})
    with pytest.raises(Dropped, match='NaN') as dropped:
        place(current, frame, broken)
    assert dropped.value.reason == BAD_POSE
    placement, _ = place(current, *second)
    np.testing.assert_allclose(placement.frame.camera.T_map_body[:3, 3], 0, atol=1e-12)


def test_a_jump_is_found_within_a_map_and_not_between_two():
    poses = results(12)
    current = session()
    found = [current.find_jump(f, *place(current, f, r)) for f, r in poses[:10]]
    frame, result = poses[10]
    far = replace(result, T_world_cam=result.T_world_cam.copy())
    far.T_world_cam[:3, 3] += 100 * STEP
    assert not any(found)
    assert 'jumped' in current.find_jump(frame, *place(current, frame, far))
    following = session(number=1)
    assert not following.find_jump(frame, *place(following, frame, far))


class FoundWhileRead(MapSession):
    """A session whose scale the worker finds right after each read of the estimator."""

    @property
    def _estimator(self):
        estimator, self._current = self._current, None
        return estimator

    @_estimator.setter
    def _estimator(self, estimator):
        self._current = estimator


@pytest.mark.parametrize('name', ['scale_status', 'scale_trouble'])
def test_the_scale_may_be_found_while_another_thread_reads_its_status(name):
    racing = session(kind=FoundWhileRead)
    racing._estimator = SimpleNamespace(status='waiting', trouble='waiting')
    assert getattr(racing, name) == 'waiting'
    assert getattr(racing, name) == {'scale_status': '1 (relative)', 'scale_trouble': ''}[name]


def test_a_new_map_holds_nothing_of_the_old_one():
    old, new = session(number=3), session(number=4)
    old.held.append(object())
    old.trouble = 'broken'
    old.is_initialized = True
    assert (new.number, new.held, new.trouble, new.view) == (4, [], '', None)
    assert new.state is State.INITIALIZING
    assert len(new.trajectory) == len(new.points) == 0
    assert not session(number=0).path_changed and new.path_changed  # an empty path replaces it
