"""Which images are admitted, before anything is decoded."""

from lingbot_map_ros.frame import Dropped, FRAME_ID, LATE, REPEATED, to_stamp, ZERO_STAMP
from lingbot_map_ros.input.admission import Admission
from lingbot_map_ros.parameters import NodeParams
import pytest
from std_msgs.msg import Header

S = 1_000_000_000
NOW = 5000 * S


def admission(**values):
    return Admission(NodeParams.from_values(values))


def admit(admission, stamp_ns=S, frame_id='cam'):
    return admission.admit(Header(stamp=to_stamp(stamp_ns), frame_id=frame_id), NOW)


def reason(admission, *arguments):
    """Return why an image is dropped, after checking that the log line names the value."""
    with pytest.raises(Dropped) as dropped:
        admit(admission, *arguments)
    assert str(dropped.value)
    return dropped.value.reason


def test_an_admitted_image_keeps_its_stamp_and_frame_id():
    admitted = admit(admission(), 3 * S + 7, 'cam7_optical')
    assert (admitted.stamp_ns, admitted.camera, admitted.jump_s) == (3 * S + 7, 'cam7_optical', 0)


def test_a_frame_id_of_old_style_loses_its_slash():
    assert admit(admission(), S, '/cam').camera == 'cam'


def test_an_empty_frame_id_is_refused_or_filled_in():
    assert reason(admission(), S, '') == FRAME_ID
    assert admit(admission(camera_frame='front'), S, '').camera == 'front'


@pytest.mark.parametrize(('frame_id', 'remedy'), [('', 'camera_frame'), ('map', 'map_frame')])
def test_a_frame_id_is_refused_with_the_remedy(frame_id, remedy):
    with pytest.raises(Dropped, match=f"the parameter '{remedy}'"):
        admit(admission(), S, frame_id)


def test_the_map_frame_is_no_camera():
    assert reason(admission(map_frame='world'), S, 'world') == FRAME_ID


def test_a_second_camera_is_refused_and_the_first_one_goes_on():
    cameras = admission()
    admit(cameras, S, 'left')
    assert reason(cameras, 2 * S, 'right') == FRAME_ID
    assert admit(cameras, 3 * S, 'left').stamp_ns == 3 * S


def test_what_is_refused_leaves_no_trace():
    images = admission()
    assert reason(images, S, '') == FRAME_ID
    assert admit(images, S, 'right').camera == 'right'
    assert reason(images, S, 'right') == REPEATED
    assert reason(images, S - 1, 'right') == LATE
    assert reason(images, 0, 'right') == ZERO_STAMP  # clocks are not mixed
    assert admit(images, 2 * S, 'right').stamp_ns == 2 * S


def test_a_jump_back_is_reported_with_its_length():
    images = admission(time_jump_threshold=1.0)
    admit(images, 100 * S)
    assert admit(images, 40 * S).jump_s == 60.0
    assert admit(images, 41 * S).jump_s == 0.0


def test_a_jump_back_can_be_waited_out():
    images = admission(on_time_jump='ignore')
    admit(images, 100 * S)
    assert reason(images, 10 * S) == LATE
    assert admit(images, 101 * S).jump_s == 0.0


def test_an_image_without_stamp_gets_the_time_of_the_node():
    assert admit(admission(), 0).stamp_ns == NOW
    assert reason(admission(zero_stamp='reject'), 0) == ZERO_STAMP
