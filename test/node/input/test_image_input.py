"""The view of each map as an object, without a node: calibration, mask and rotation."""

import threading
import time

from calibration import H, info, K, NEXT_MAP, P, raw_pixels, rectified, W
from fake_engine import DEPTH, FakeEngine, STEP
from image_messages import encode, ENCODINGS, png
from lingbot_map.errors import UserError
from lingbot_map.geometry import quaternion_to_matrix, R_REP103_OPTICAL
from lingbot_map.images.decoding import to_rgb
from lingbot_map.images.view import camera_rotation, GREY, rotate_image, ROTATIONS
from lingbot_map.mapping.points import PointFilter
from lingbot_map.settings import ParameterError
from lingbot_map_ros.frame import Frame, to_stamp
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.input.camera_info import CameraInfoStore
from lingbot_map_ros.input.images import ImageInput
from lingbot_map_ros.mapping.ledger import Ledger
from lingbot_map_ros.mapping.map_session import MapSession
from lingbot_map_ros.output.conversions import pose_message
from lingbot_map_ros.parameters import NodeParams
import numpy as np
import pytest
from rclpy.logging import get_logger
from sensor_msgs.msg import CameraInfo
from std_msgs.msg import Header
import torch

SIZE = (W, H)
WAIT_S = 20.0


class Input:
    """An ImageInput and its CameraInfoStore with a logger of rclpy, which throttles."""

    def __init__(self, timeout_s=0.0, is_expected=True, **values):
        self.params = NodeParams.from_values({'num_scale_frames': 1, **values})
        logger = get_logger('image_input')
        self.infos = CameraInfoStore('/camera_info', lambda: is_expected, timeout_s, logger)
        self.images = ImageInput(self.params, self.infos, logger)

    def new_map(self, frame_id='cam', size=SIZE):
        return self.images.view(size, frame_id)

    def prepared(self):
        """Return what the network sees of the image in a new map."""
        return self.new_map().prepare(raw_pixels())

    def intrinsics(self):
        """Return the intrinsics (3, 3) of a result in a new map."""
        view = self.new_map()
        (result,) = FakeEngine(self.params).push(view.prepare(raw_pixels()), None)
        return view.restore(result).network_intrinsics


def test_a_camera_info_of_another_camera_is_named_once(capfd):
    given = Input()
    for frame_id in ('right', '/cam', ''):
        given.infos.receive(info(frame_id=frame_id))
        for _ in range(3):
            given.new_map()
    err = capfd.readouterr().err
    assert err.count('camera_info has the frame') == 1
    assert "camera_info has the frame 'right' and the images have 'cam'" in err


def test_camera_info_is_compared_with_the_frame_of_the_parameter(capfd):
    given = Input(use_camera_info=True, camera_frame='cam')
    given.infos.receive(info())
    given.new_map(Admission(given.params).admit(Header(frame_id=''), 1).camera)
    assert 'camera_info has the frame' not in capfd.readouterr().err


def test_no_camera_info_ever_is_no_obstacle(capfd):
    given = Input(timeout_s=60.0, is_expected=False)
    for _ in range(2):
        assert given.images.ready(0.0)
        np.testing.assert_array_equal(given.prepared(), raw_pixels())
        assert given.images.camera_status == 'not received on /camera_info'
    assert 'camera_info' not in capfd.readouterr().err


def test_use_camera_info_without_one_is_a_warning_once_per_view(capfd):
    given = Input(use_camera_info=True)
    for _ in range(3):
        assert given.intrinsics()[0, 0] == W  # of the fake engine
    assert capfd.readouterr().err.count('nothing was received on /camera_info') == 1


def test_the_first_image_waits_for_a_camera_info_that_is_on_its_way():
    given = Input(timeout_s=60.0)
    assert not given.images.ready(0.0)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(given.images.ready(60.0)))
    waiter.start()
    given.infos.receive(info())
    waiter.join(WAIT_S)
    assert answers == [True]
    np.testing.assert_array_equal(given.prepared(), rectified())


def test_a_silent_publisher_of_camera_info_delays_only_the_first_image():
    given = Input(timeout_s=0.1)
    start_s = time.monotonic()
    while not given.images.ready(0.02):
        assert time.monotonic() - start_s < WAIT_S
    assert time.monotonic() - start_s >= 0.1
    np.testing.assert_array_equal(given.prepared(), raw_pixels())
    assert given.images.ready(0.0)  # of the next map


def test_camera_info_at_another_rate_changes_nothing(capfd):
    given = Input()
    given.infos.receive(info())
    view = given.new_map()
    for _ in range(5):
        given.infos.receive(info())
        assert not given.infos.has_changed
        assert given.new_map() is view
    err = capfd.readouterr().err
    assert NEXT_MAP not in err
    assert err.count('images are rectified (plumb_bob)') == 1


@pytest.mark.parametrize('first', [None, info(d=())])
def test_a_late_or_new_calibration_is_used_from_the_next_map_on(first, capfd):
    given = Input(use_camera_info=True)
    if first is not None:
        given.infos.receive(first)
    assert given.intrinsics()[0, 0] == pytest.approx(W if first is None else K[0, 0])
    for _ in range(3):
        given.infos.receive(info(d=(), k=K * [[0.5], [0.5], [1]]))
    assert given.images.camera_status == 'received, used from the next map on'
    assert given.intrinsics()[0, 0] == pytest.approx(K[0, 0] / 2)
    assert given.images.camera_status == 'used'
    assert capfd.readouterr().err.count(NEXT_MAP) == 1


def test_a_calibration_that_changes_all_the_time_does_not_fill_the_log(capfd):
    given = Input(use_camera_info=True)
    given.infos.receive(info())
    given.new_map()
    for i in range(20):  # as a lens does that focuses
        given.infos.receive(info(k=np.diag((1.0 + i, 1.0, 0.0)) + K))
    assert 1 <= capfd.readouterr().err.count(NEXT_MAP) < 5


USELESS = (
    (info(size=(2 * W, 2 * H)), 'it is for images of 112x84, but these are 56x42'),
    (info(k=np.zeros((3, 3))), 'the camera is not calibrated: its K is zero'),
    (CameraInfo(), 'its image size 0x0 is invalid: sides must be 1 to 16384 pixels'),
    (info(d=(np.nan,)), 'it contains NaN or infinity'),
)


def test_a_camera_info_of_no_use_is_named_and_images_go_on(capfd):
    given = Input(use_camera_info=True)
    for message, reason in USELESS:
        given.infos.receive(message)
        np.testing.assert_array_equal(given.prepared(), raw_pixels())
        assert given.images.camera_status == f'not used: {reason}'
    err = capfd.readouterr().err
    assert all(err.count(f'camera_info is not used: {reason}') == 1 for _, reason in USELESS)


def test_rectified_images_are_not_undistorted_again():
    given = Input(use_camera_info=True, image_rectified=True)
    given.infos.receive(info())
    np.testing.assert_array_equal(given.prepared(), raw_pixels())
    np.testing.assert_allclose(given.intrinsics(), P[:, :3], atol=1e-9)


def test_another_image_size_needs_the_camera_info_for_it():
    given = Input()
    given.infos.receive(info())
    given.new_map()
    given.infos.receive(info(d=(), size=(2 * W, 2 * H)))
    large = np.zeros((2 * H, 2 * W, 3), np.uint8)
    np.testing.assert_array_equal(given.new_map(size=(2 * W, 2 * H)).prepare(large), large)
    assert given.images.camera_status == 'used'


def test_a_mask_file_of_another_size_is_refused_with_both_sizes(tmp_path):
    (tmp_path / 'mask.png').write_bytes(png(np.full((10, 20, 3), 255, np.uint8)).data)
    given = Input(image_mask=str(tmp_path / 'mask.png'))
    with pytest.raises(UserError, match='20x10 pixels and the images have 56x42'):
        given.new_map()


def test_a_mask_that_is_none_is_an_error_of_the_parameter():
    with pytest.raises(ParameterError, match="'image_mask': '/nowhere.png' is neither"):
        Input(image_mask='/nowhere.png')


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def mapped(given, images):
    """Return what the network sees, and where results are in a map of a camera without robot."""
    engine = FakeEngine(given.params)
    counts, admission = Ledger(None).counts(), Admission(given.params)
    session = MapSession(0, given.params, admission, counts, None, None)
    view = given.new_map(size=images[0].shape[1::-1])
    placements = []
    for i, image in enumerate(images):
        frame = Frame(None, to_stamp(i + 1), 'cam', 0.0)
        (result,) = map(view.restore, engine.push(view.prepare(image), frame))
        assert session.estimate_scale(frame, result) is None
        placements.append(session.place(result)[0])
    return list(engine.pictures), placements


def test_every_encoding_is_seen_by_the_network_as_it_is_decoded():
    given, size = Input(), (57, 43)
    view = given.new_map(size=size)
    for i, name in enumerate(ENCODINGS):
        message = encode(name, noise(size), 3, i % 2)
        seen = view.prepare(given.images.decode(message))
        np.testing.assert_array_equal(seen, to_rgb(message))


def test_an_overlay_behind_the_mask_changes_nothing_and_never_becomes_points():
    first, second = noise((57, 43)), noise((57, 43), seed=1)
    inside = np.zeros((43, 57), bool)
    inside[8:, 10:] = True
    second[inside] = first[inside]
    given = Input(image_mask='10,8,0,0', base_frame='')
    (one, two), (placement, _) = mapped(given, [first, second])
    np.testing.assert_array_equal(one, two)
    assert (one[~inside] == GREY).all()
    np.testing.assert_array_equal(one[inside], first[inside])
    depth = placement.frame.depth.numpy()
    assert depth.shape == (42, 56)
    assert np.isnan(depth[:7]).all()
    assert np.isnan(depth[:, :9]).all()
    assert np.isfinite(depth[9:, 11:]).all()
    assert len(PointFilter()(placement.frame)) == np.isfinite(depth).sum()


@pytest.mark.parametrize('degrees', ROTATIONS)
def test_a_camera_mounted_sideways_keeps_its_frame_and_the_map_is_upright(degrees):
    """The fake network sees a wall ahead, wider than high, and moves towards it."""
    upright = noise((56, 42))
    mounted = rotate_image(upright, -degrees % 360)
    given = Input(image_rotation=degrees, base_frame='')
    seen, placements = mapped(given, [mounted] * 3)
    np.testing.assert_array_equal(seen[0], upright)
    assert {placement.body_frame for placement in placements} == {'cam'}
    pose = pose_message(placements[2].body)
    position = (pose.position.x, pose.position.y, pose.position.z)
    assert position == pytest.approx((2 * STEP, 0, 0), abs=1e-6)
    q = pose.orientation
    R_map_cam = quaternion_to_matrix(torch.tensor([q.x, q.y, q.z, q.w])).numpy()
    expected = R_REP103_OPTICAL @ camera_rotation(degrees)
    np.testing.assert_allclose(R_map_cam, expected, atol=1e-6)
    assert placements[0].frame.depth.shape == mounted.shape[:2]
    cloud = PointFilter(stride=given.params.points.stride)(placements[0].frame)
    spans = [np.ptp(cloud[axis]) for axis in 'xyz']
    assert spans == pytest.approx((0, 54 / 56 * DEPTH, 40 / 56 * DEPTH), abs=1e-5)
    assert cloud['x'].mean() == pytest.approx(DEPTH, abs=1e-5)
