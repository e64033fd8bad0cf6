"""
Measure what the node costs beyond the network, beside plain copies of the same bytes.

Images of 640x480 go over DDS through the whole node at 30 Hz or slower, whose network answers at
once with depth of 518x392; all in one process, on a domain of its own. Printed are medians and
95th percentiles of the time that passes, and the median of what the thread itself computes: the
rest is waiting for a core or for another thread, of which this process has more than a node alone.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
import sys
import threading
import time

from lingbot_map.mapping.points import POINT_DTYPE
from lingbot_map.streaming.frame import FrameResult
from lingbot_map.streaming.preprocess import crop_map
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.output import conversions
from lingbot_map_ros.parameters import NodeParams
from lingbot_map_ros.rclpy_fixes import NodeExecutor
import numpy as np
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image, PointCloud2
from std_msgs.msg import Header
import torch

_IMAGE_SIZE = (640, 480)
_NETWORK_WIDTH = 518
_CLOUD_POINTS = 1_000_000
_PERIOD_S = 1 / 30
_ROUNDS = 20
_WAIT_S = 30.0
_DOMAIN_ID = 102  # a running robot hears nothing of this


class NoNetwork:
    """Stands in for a StreamEngine: the camera stands still before a wall."""

    waiting = window = sequence = 0
    compile_mode, attention_backend = 'off', 'none'
    keyframe_interval = 1
    last_scale_step, last_residual = 1.0, 0.0
    is_static, gated_frames = False, 0

    def __init__(self, params: NodeParams):
        self.frames = self.keyframes = self.held_keyframes = 0
        self.max_keyframes = params.max_keyframes
        self._mapping = crop_map(*_IMAGE_SIZE, _NETWORK_WIDTH, 14)
        width, height = self._mapping.network_size
        self._depth = torch.full((height, width), 2.0)
        self._rgb = torch.full((height, width, 3), 128, dtype=torch.uint8)

    def network_size(self, height: int, width: int) -> tuple[int, int]:
        return self._mapping.network_size

    def warm_up(self, height: int, width: int) -> None:
        """Nothing to warm up."""

    def reset(self) -> None:
        self.frames = self.keyframes = self.held_keyframes = 0

    def flush(self) -> list[FrameResult]:
        return []

    def push(self, rgb: np.ndarray, tag: object) -> list[FrameResult]:
        self.frames += 1
        self.keyframes += 1
        self.held_keyframes += 1
        K = np.array([[500.0, 0.0, 259.0], [0.0, 500.0, 196.0], [0.0, 0.0, 1.0]])
        return [
            FrameResult(
                tag=tag,
                index=self.frames - 1,
                is_keyframe=True,
                T_world_cam=np.eye(4),
                intrinsics=self._mapping.to_original(K),
                network_intrinsics=K,
                depth=self._depth,
                confidence=self._depth,
                rgb=self._rgb,
                mapping=self._mapping,
                timings_ms={'preprocess': 0.0, 'forward': 0.0},
            )
        ]


class Stopwatch:
    """Collects how long something takes: time that passes, and time of the thread itself."""

    def __init__(self):
        self.passed_ms: list[float] = []
        self.thread_ms: list[float] = []

    def add(self, passed_s: float, thread_s: float) -> None:
        self.passed_ms.append(1e3 * passed_s)
        self.thread_ms.append(1e3 * thread_s)

    def watch(self, function: Callable) -> Callable:
        """Return the function, each call of which is added."""

        def watched(*args, **kwargs):
            start_s, thread_start_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(time.perf_counter() - start_s, time.thread_time() - thread_start_s)

        return watched

    def say(self, what: str, note: str = '') -> None:
        median, p95 = np.percentile(self.passed_ms, (50, 95))
        numbers = f'{median:8.2f} {p95:8.2f} {np.median(self.thread_ms):8.2f}'
        sys.stdout.write(f'{what:42} {numbers}   {note}\n'.rstrip() + '\n')


class Camera(Node):
    """Sends images one by one and hears the clouds and acknowledgements."""

    def __init__(self):
        super().__init__('benchmark_camera')
        self._processed = threading.Semaphore(0)
        self._publisher = self.create_publisher(Image, 'image', 10)
        self.create_subscription(PointCloud2, '/lingbot_map/points', lambda cloud: None, 10)
        self.create_subscription(
            Header, '/lingbot_map/processed', lambda header: self._processed.release(), 10
        )
        width, height = _IMAGE_SIZE
        self._message = Image(width=width, height=height, encoding='rgb8', step=3 * width)
        self._message.data = array('B', bytes(3 * width * height))

    def send(self, number: int) -> bool:
        """Send image `number`, counted from 1; tell whether the node is done with it in time."""
        self._message.header = Header(frame_id='camera')
        self._message.header.stamp.sec = number
        self._publisher.publish(self._message)
        return self._processed.acquire(timeout=_WAIT_S)

    def is_heard(self) -> bool:
        return self._publisher.get_subscription_count() > 0


def main(argv: list[str] | None = None) -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--frames', type=int, default=200, help='images to send (%(default)s)')
    frames = parser.parse_args(argv).frames
    if frames < 10:
        parser.error(f'--frames is {frames}: set it to 10 or more')
    sys.stdout.write(f'{"[ms]":42} {"median":>8} {"p95":>8} {"thread":>8}\n')
    torch.set_num_threads(1)
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    rclpy.init(args=[], domain_id=_DOMAIN_ID)
    try:
        heard = _measure_node(frames)
    finally:
        rclpy.try_shutdown()
    _measure_large_cloud()
    return 0 if heard else 1


def _measure_node(frames: int) -> bool:
    pose, publishing = Stopwatch(), Stopwatch()
    with _running() as (node, camera):
        _watch_poses(node, pose)
        thread = node.pipeline.outputs._thread
        thread._guarded = publishing.watch(thread._guarded)
        for number in range(1, frames + 1):
            if not camera.send(number):
                sys.stderr.write(f'image {number} did not come back within {_WAIT_S:g} s\n')
                return False
            time.sleep(_PERIOD_S)
    pose.say('image 640x480 to odometry and TF', 'aim: at most 5')
    _copies(3 * _IMAGE_SIZE[0] * _IMAGE_SIZE[1]).say('  plain copy of its bytes')
    publishing.say('cloud 518x392 on the publisher thread', 'aim: at most 5')
    _copies(518 * 392 * POINT_DTYPE.itemsize).say('  plain copy of its bytes')
    return True


def _watch_poses(node: LingbotMapNode, stopwatch: Stopwatch) -> None:
    """Add how long each image takes from its callback until its pose is out."""
    worker, ledger = node.pipeline.worker, node.pipeline.ledger
    process, count_out, started_s = worker._process, ledger.count_out, [0.0]

    def begin(frame) -> None:
        started_s[0] = time.thread_time()
        process(frame)

    def note(frame, *rest) -> None:
        stopwatch.add(time.monotonic() - frame.arrival_s, time.thread_time() - started_s[0])
        count_out(frame, *rest)

    worker._process, ledger.count_out = begin, note


@contextmanager
def _running() -> Iterator[tuple[LingbotMapNode, Camera]]:
    values = {
        'autostart': False,
        'queue': 'lossless',
        'num_scale_frames': 1,
        'max_keyframes': 100000,
        'points.stride': 1,
        'map.voxel_size': 0.0,
        'model': 'demo',
    }
    overrides = [Parameter(name, value=value) for name, value in values.items()]
    node, camera = LingbotMapNode(NoNetwork, parameter_overrides=overrides), Camera()
    executors = [NodeExecutor(), SingleThreadedExecutor()]
    for executor, spun in zip(executors, (node, camera), strict=True):
        executor.add_node(spun)
        threading.Thread(target=executor.spin, daemon=True).start()
    try:
        node.trigger_configure()
        outputs = node.pipeline.outputs
        node.trigger_activate()
        while not (camera.is_heard() and outputs.wants_points(True)):
            time.sleep(0.05)
        yield node, camera
    finally:
        for executor in executors:
            executor.shutdown()
        node.close(_WAIT_S)


def _measure_large_cloud() -> None:
    points = np.zeros(_CLOUD_POINTS, POINT_DTYPE)
    copying, building, serialising = _copies(points.nbytes), Stopwatch(), Stopwatch()
    build, serialise = building.watch(conversions.cloud), serialising.watch(serialize_message)
    header = Header(frame_id='map')
    for _ in range(_ROUNDS):
        build(header, points)
    message = conversions.cloud(header, points)
    for _ in range(_ROUNDS):
        serialise(message)
    ratio = np.median(building.thread_ms) / np.median(copying.thread_ms)
    building.say('building a cloud of 1 M points', f'{ratio:.1f} copies, aim: at most 4')
    copying.say('  plain copy of its bytes')
    serialising.say('  serialising it')


def _copies(size: int) -> Stopwatch:
    source, stopwatch = np.zeros(size, np.uint8), Stopwatch()
    copy = stopwatch.watch(source.copy)
    for _ in range(_ROUNDS):
        copy()
    return stopwatch


if __name__ == '__main__':
    sys.exit(main())
