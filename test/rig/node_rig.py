"""A node under test and a probe that talks to it over DDS, in one process."""

from array import array
from collections import defaultdict
from contextlib import contextmanager
import faulthandler
import gc
import threading
import time

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from fake_engine import FakeEngine
from geometry_msgs.msg import PoseStamped
from lingbot_map_ros.diagnostics import state_text
from lingbot_map_ros.node import LingbotMapNode
from lingbot_map_ros.rclpy_fixes import NodeExecutor
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import SetParameters
import rclpy
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_msgs.msg import Header
from std_srvs.srv import SetBool, Trigger
from tf2_msgs.msg import TFMessage

WAIT_S = 60.0  # generous: the machine may be busy
gc.freeze()  # what is imported stays: collecting it after each node would take 0.1 s
_LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_ALWAYS = {
    'odometry': ('/lingbot_map/odometry', Odometry, 200),
    'processed': ('/lingbot_map/processed', Header, 200),
    'tf': ('/tf', TFMessage, 200),
    'diagnostics': ('/diagnostics', DiagnosticArray, 50),
}
_WANTED = {
    'pose': ('/lingbot_map/pose', PoseStamped, 200),
    'path': ('/lingbot_map/path', Path, _LATCHED),
    'points': ('/lingbot_map/points', PointCloud2, 200),
    'map': ('/lingbot_map/map', PointCloud2, _LATCHED),
    'depth': ('/lingbot_map/depth', Image, 200),
    'confidence': ('/lingbot_map/confidence', Image, 200),
    'depth_info': ('/lingbot_map/depth/camera_info', CameraInfo, 200),
}


class Rig:
    """The node, its engines in the order they were made, and all that was heard by topic."""

    def __init__(self, topics: tuple[str, ...], **engine_options):
        self.engines: list[FakeEngine] = []
        self.heard: dict[str, list] = defaultdict(list)
        self.probe = rclpy.create_node('probe')
        self.node: LingbotMapNode | None = None
        self._engine_options = engine_options
        self._changed = threading.Condition()
        self._image_pub = self.probe.create_publisher(Image, '/image', 200)
        for name in (*_ALWAYS, *topics):
            self.listen(name)

    def make_engine(self, params) -> FakeEngine:
        self.engines.append(FakeEngine(params, **self._engine_options))
        return self.engines[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def listen(self, name: str) -> None:
        topic, kind, qos = (_ALWAYS | _WANTED)[name]

        def hear(message):
            with self._changed:
                self.heard[name].append(message)
                self._changed.notify_all()

        self.probe.create_subscription(kind, topic, hear, qos)

    def wait(self, is_true, what: str = '') -> None:
        with self._changed:
            deadline_s = time.monotonic() + WAIT_S
            while not is_true():
                if time.monotonic() >= deadline_s:
                    faulthandler.dump_traceback()  # of all threads: one of them may hang
                    raise AssertionError(what or f'{self.counts()}')
                self._changed.wait(0.02)

    def wait_for(self, topic: str, count: int) -> list:
        self.wait(
            lambda: len(self.heard[topic]) >= count,
            f'{count} messages on {topic}, got {len(self.heard[topic])}',
        )
        return self.heard[topic]

    def wait_connected(self) -> None:
        """Wait until the node hears the probe and the probe hears the node."""
        if self.node.pipeline.params.image_transport == 'raw':
            self.wait(lambda: self._image_pub.get_subscription_count() == 1, 'image subscription')
        outputs = self.node.pipeline.outputs
        self.wait(
            lambda: all(
                pub.get_subscription_count() == self.probe.count_subscribers(pub.topic_name)
                for pub in (*outputs._publishers, self.node._diagnostics_pub)
            ),
            'subscriptions of the probe',
        )
        if outputs.transform is not None:
            tf_pub = outputs.transform._broadcaster.pub_tf
            self.wait(lambda: tf_pub.get_subscription_count() >= 1, '/tf')

    def send(self, *stamps_s: float, **fields) -> None:
        for stamp_s in stamps_s:
            self._image_pub.publish(image(stamp_s, **fields))

    def publisher(self, kind, topic: str, qos=10):
        """Return a publisher of the probe that the node hears."""
        publisher = self.probe.create_publisher(kind, topic, qos)
        self.wait(lambda: publisher.get_subscription_count() >= 1, f'subscription of {topic}')
        return publisher

    def publish(self, stamp_s: float, message) -> None:
        """Send an image message that has no header yet."""
        message.header = Header(stamp=to_time(stamp_s), frame_id='cam')
        self._image_pub.publish(message)

    def diagnostic(self, key: str) -> str:
        """Return a value of the next diagnostics."""
        count = len(self.heard['diagnostics'])
        array = self.wait_for('diagnostics', count + 1)[-1]
        return {value.key: value.value for value in array.status[0].values}[key]

    def call(self, name: str, request=None):
        kind = SetBool if name == 'pause' else Trigger
        return self.request(kind, f'/lingbot_map/{name}', request or kind.Request())

    def set_parameter(self, name: str, value):
        message: ParameterMessage = Parameter(name, value=value).to_parameter_msg()
        request = SetParameters.Request(parameters=[message])
        return self.request(SetParameters, '/lingbot_map/set_parameters', request).results[0]

    def request(self, kind, name: str, request):
        future = self._send_request(kind, name, request)
        self.wait(future.done, f'answer of {name}')
        return future.result()

    def request_later(self, name: str, kind=Trigger, request=None):
        """Return the future of a service call."""
        return self._send_request(kind, f'/lingbot_map/{name}', request or kind.Request())

    def _send_request(self, kind, name: str, request):
        client = self.probe.create_client(kind, name)
        assert client.wait_for_service(WAIT_S), name
        return client.call_async(request)

    def counts(self):
        return self.node.pipeline and self.node.pipeline.ledger.counts()

    def wait_counts(self, received: int, out: int, **dropped: int) -> None:
        """Wait until nothing waits, then compare every count exactly."""
        self.wait(lambda: self.counts().received >= received and self.counts().waiting == 0)
        counts = self.counts()
        assert (counts.received, counts.out, counts.dropped) == (received, out, dropped)

    def state(self) -> str:
        return state_text(self.node.pipeline)

    def stamps(self, topic: str) -> list[float]:
        return [stamp_s(message) for message in self.heard[topic]]


@contextmanager
def running(topics: tuple[str, ...] = (), autostart: bool = True, engine=None, **params):
    """
    Yield a Rig with a node that has `params` (dots as double underscores) and is being spun.

    `engine` are options of FakeEngine. The default queue is lossless here, the scale batch small.
    """
    params = {'queue': 'lossless', 'num_scale_frames': 2, 'queue_size': 200} | params
    params = {name.replace('__', '.'): value for name, value in params.items()}
    rig = Rig(topics, **(engine or {}))
    rig.node = LingbotMapNode(
        rig.make_engine,
        parameter_overrides=[
            Parameter(name, value=value)
            for name, value in {'autostart': autostart, **params}.items()
        ],
        diagnostics_period_s=0.1,
    )
    executors = [NodeExecutor(), NodeExecutor()]
    executors[0].add_node(rig.node)
    executors[1].add_node(rig.probe)
    spinners = [threading.Thread(target=executor.spin) for executor in executors]
    for spinner in spinners:
        spinner.start()
    try:
        if autostart:
            rig.wait(lambda: rig.node._image_topic and rig.state() == 'WAITING_FOR_IMAGES')
            rig.wait_connected()
        yield rig
    finally:
        rig.node.leaving.set()
        for executor in executors:
            executor.shutdown()
        for spinner in spinners:
            spinner.join()
        assert rig.node.close(WAIT_S)
        rig.node.destroy_node()
        rig.probe.destroy_node()
        rig.node = None
        gc.collect()  # rclpy keeps the middleware's part of a lifecycle node until then


def image(stamp_s: float, frame_id='cam', encoding='rgb8', size=(56, 42), step=None, data=None):
    """Return an image message of `size` (width, height), mid grey unless `data` is given."""
    width, height = size
    channels = {'mono8': 1, 'rgba8': 4, 'bgra8': 4}.get(encoding, 3)
    step = width * channels if step is None else step
    message = Image(height=height, width=width, encoding=encoding, step=step)
    message.header = Header(stamp=to_time(stamp_s), frame_id=frame_id)
    message.data = array('B', bytes([128]) * (step * height) if data is None else data)
    return message


def to_time(stamp_s: float) -> Time:
    """Return a stamp with nanoseconds of its own, so that none gets lost unnoticed."""
    if stamp_s == 0:
        return Time()
    return Time(sec=int(stamp_s), nanosec=round(stamp_s % 1 * 1e9) + 7)


def stamp_s(message) -> float:
    if isinstance(message, TFMessage):
        message = message.transforms[0]
    stamp = message.stamp if isinstance(message, Header) else message.header.stamp
    assert stamp.nanosec % 10 == 7, f'{stamp} is not the stamp of an image'
    return stamp.sec + (stamp.nanosec - 7) / 1e9
