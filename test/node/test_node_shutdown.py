"""What is left of a process that is told to end: whole files, whatever it was doing."""

import signal
import threading

from fake_engine import DEPTH
from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map_ros.rclpy_fixes import NodeExecutor
from nav_msgs.msg import Path
from node_rig import image
import numpy as np
from plyfile import PlyData
from program import Program, WAIT_S
import pytest
import rclpy
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import Image

pytestmark = pytest.mark.usefixtures('ros')


def block_at_fourth(number):
    if number == 4:
        threading.Event().wait()


def start(folder, *options):
    """Start a node whose engine blocks at the fourth image, and that loses none on the way."""
    options = ('num_scale_frames:=1', 'queue:=lossless', 'path.publish_rate:=50.0', *options)
    parameters = [word for option in options for word in ('-p', option)]
    program = Program(folder, *parameters, before_push=block_at_fourth)
    program.wait_for_line('waiting for images')
    return program


def feed(count):
    """Send images until the node has them, and three poses are out."""
    camera = rclpy.create_node('camera')
    paths = []
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    camera.create_subscription(Path, '/lingbot_map/path', paths.append, latched)
    publisher = camera.create_publisher(Image, '/image', QoSProfile(depth=10))
    executor = SingleThreadedExecutor()
    executor.add_node(camera)
    try:
        while not publisher.get_subscription_count():
            executor.spin_once(timeout_sec=0.1)
        for i in range(1, count + 1):
            publisher.publish(image(float(i)))
        while not (paths and len(paths[-1].poses) == 3):
            executor.spin_once(timeout_sec=0.1)
        assert publisher.wait_for_all_acked(Duration(seconds=WAIT_S))
    finally:
        executor.shutdown()
        camera.destroy_node()


@pytest.mark.parametrize(
    'images, numbers, watchdog_s, code',
    [
        (3, (signal.SIGINT, signal.SIGINT), 0, 0),
        (4, (signal.SIGTERM, signal.SIGTERM), 0, 0),  # while the fourth is stuck in the engine
        (4, (), 0.5, 1),
    ],
)
def test_map_and_trajectory_are_saved_whole(tmp_path, images, numbers, watchdog_s, code):
    program = start(tmp_path, f'autosave:={tmp_path}/saved', f'watchdog_timeout:={watchdog_s}')
    feed(images)
    for number in numbers:
        program.send_signal(number)
    returncode, output = program.end()
    assert returncode == code, output
    assert 'on_shutdown was called' not in output  # rclpy does not, so the process saves by itself
    files = {path.suffix: path for path in (tmp_path / 'saved').iterdir()}
    assert set(files) == {'.ply', '.pcd', '.tum'} and len(files) == len(set(files.values()))
    rows = np.loadtxt(files['.tum'])
    np.testing.assert_allclose(rows[:, 0], [1, 2, 3], atol=1e-6)
    np.testing.assert_allclose(rows[:, 1:4], [[0, 0, 0], [1, 0, 0], [2, 0, 0]], atol=1e-9)
    vertices = PlyData.read(files['.ply'])['vertex']
    # Each of the three images shows a wall DEPTH ahead of it.
    assert set(np.round(vertices['x'], 3)) == {DEPTH, DEPTH + 1, DEPTH + 2}
    header, points = files['.pcd'].read_bytes().split(b'DATA binary\n')
    assert f'POINTS {len(vertices["x"])}'.encode() in header
    np.testing.assert_array_equal(np.frombuffer(points, POINT_DTYPE)['x'], vertices['x'])
    assert all(str(path) in output for path in files.values())


def test_the_executor_waits_for_callbacks_when_it_is_shut_down(capfd):
    """Else some of them fail, with a line on an exception that was never retrieved."""
    node, busy, go_on, done = rclpy.create_node('busy'), threading.Event(), threading.Event(), []

    def work():
        busy.set()
        go_on.wait(WAIT_S)
        done.append(True)

    node.create_timer(0.01, work, MutuallyExclusiveCallbackGroup())
    executor = NodeExecutor()
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin)
    spinner.start()
    try:
        assert busy.wait(WAIT_S)
        assert not executor.shutdown(timeout_sec=0.1)
        assert not done
        go_on.set()
        assert executor.shutdown()
        assert done
    finally:
        go_on.set()
        spinner.join()
        node.destroy_node()
    assert capfd.readouterr().err == ''


def test_nothing_is_saved_unasked_and_an_empty_map_leaves_no_file(tmp_path):
    program = start(tmp_path, f'autosave:={tmp_path}/saved')
    program.send_signal(signal.SIGINT)
    assert program.end()[0] == 0
    assert list((tmp_path / 'saved').iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / 'file').write_text('')
    returncode, output = Program(tmp_path, '-p', f'autosave:={tmp_path}/file/x').end()
    assert returncode == 1
    assert "parameter 'autosave' is" in output
