"""From the image callback to the publishers: everything that lives from configure to cleanup."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
import time

from lingbot_map.streaming.engine import StreamEngine
from lingbot_map.streaming.loading import choose_device
from lingbot_map_ros.frame import (
    Dropped,
    Frame,
    FRAME_ID,
    INACTIVE,
    QUEUE_FULL,
    RESET,
    SUPERSEDED,
    to_ns,
    to_stamp,
)
from lingbot_map_ros.input import camera_info
from lingbot_map_ros.input.admission import GapWatch, StampGate
from lingbot_map_ros.input.images import ImageInput
from lingbot_map_ros.input.inbox import Inbox
from lingbot_map_ros.mapping.ledger import GAP, Ledger
from lingbot_map_ros.mapping.worker import SERVING, Worker
from lingbot_map_ros.output.publishing import Outputs
from lingbot_map_ros.output.saving import autosave, check_autosave
from lingbot_map_ros.parameters import NodeParams
from sensor_msgs.msg import CompressedImage, Image

INITIALIZING = 'INITIALIZING'  # the state, before how many of how many images
_WARM_UPS = 4.0  # the warm-up runs a scale batch too, the longest that an image takes
_SILENCE_S = 2.0  # without an image for so long, the node says that it waits for images


class Pipeline:
    """
    Admits images, and owns inbox, worker and outputs.

    `on_image` is called by one thread at a time; the other methods by any.
    """

    def __init__(self, node, params: NodeParams, load: Callable[[NodeParams], StreamEngine]):
        check_autosave(params.autosave)
        self.params = params
        self.paused = False
        self.ledger = Ledger(node.get_logger(), lambda: node.get_clock().now().nanoseconds)
        topic = node.resolve_topic_name(camera_info.TOPIC)
        infos = camera_info.CameraInfoStore(
            topic,
            lambda: params.use_camera_info or node.count_publishers(topic) > 0,
            params.camera_info_timeout,
            node.get_logger(),
        )
        self.images = ImageInput(params, infos, node.get_logger())
        self.outputs = Outputs(node, params)
        self._info_subscription = camera_info.CameraInfoSubscription(node, infos)
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        latest = params.queue == 'latest'
        self._inbox = Inbox(1 if latest else params.queue_size, newest_wins=latest)
        self._gate = StampGate(params.time_jump_threshold, params.on_time_jump, params.zero_stamp)
        self._gaps = GapWatch()
        self._is_autosaved = False
        self._camera = ''  # frame id of the images of this map
        self.worker = Worker(
            load, self.images, self._inbox, self.ledger, self.outputs, self._logger
        )

    def set_params(self, params: NodeParams) -> None:
        self.params = self.outputs.params = params

    def on_image(self, message: Image | CompressedImage) -> None:
        """Admit an image or drop it; the worker does the rest."""
        if self.paused:
            self.ledger.count_paused()
            self._gaps.forget()
            self.outputs.acknowledge(message.header)
            return
        self.ledger.receive()
        with self.outputs.lock:  # a reset is before or after this image
            loser, reason, why = self._admit(message)
        if loser is not None:
            self.ledger.count_drop(reason, why)
            self.outputs.acknowledge(loser.header)

    def _admit(
        self, message: Image | CompressedImage
    ) -> tuple[Image | CompressedImage | None, str, str]:
        """Return the image that has to give way, if any, and why."""
        try:
            camera = self._check_frame_id(message.header.frame_id)
            admission = self._gate.judge(
                to_ns(message.header.stamp), self._clock.now().nanoseconds
            )
        except Dropped as drop:
            return message, drop.reason, str(drop)
        if admission.jump_s:
            self._start_new_map(f'image stamps jumped back by {admission.jump_s:.3f} s')
        gap = self._gaps.see(admission.stamp_ns)
        if gap:
            self.ledger.count_event(GAP, gap)
        self._camera = camera
        loser = self._inbox.put(
            Frame(message, to_stamp(admission.stamp_ns), camera, time.monotonic())
        )
        if loser is None:
            return None, '', ''
        if self.params.queue == 'latest':
            return loser.message, SUPERSEDED, ''
        return (
            loser.message,
            QUEUE_FULL,
            (
                f'{self.params.queue_size} images wait already: wait for ~/processed before '
                "sending more, or raise the parameter 'queue_size'"
            ),
        )

    def _check_frame_id(self, frame_id: str) -> str:
        frame_id = (frame_id or self.params.camera_frame).lstrip('/')
        if not frame_id:
            raise Dropped(
                FRAME_ID,
                'its frame_id is empty: have the camera driver set one, or '
                "set the parameter 'camera_frame'",
            )
        if frame_id == self.params.map_frame:
            raise Dropped(
                FRAME_ID,
                f"its frame_id '{frame_id}' is the map frame: change the parameter 'map_frame'",
            )
        if self._camera and frame_id != self._camera:
            raise Dropped(
                FRAME_ID,
                f"its frame_id is '{frame_id}', that of the images before "
                f"'{self._camera}': two cameras on one topic? ~/reset accepts the new",
            )
        return frame_id

    def reset(self) -> None:
        """Start a new map; nothing of the old one is published once this has returned."""
        with self.outputs.lock:
            self._gate.forget()
            self._camera = ''
            self._start_new_map('reset was called')

    def _start_new_map(self, why: str) -> None:
        self.outputs.start_new_map()
        self._gaps.forget()
        self._empty_inbox(RESET)
        self.ledger.begin_map()
        self._inbox.wake()
        self._logger.info(f'{why}: starting a new map')

    def _empty_inbox(self, reason: str) -> None:
        for frame in self._inbox.clear():
            self.ledger.count_drop(reason)
            self.outputs.acknowledge(frame.message.header)

    def flush(self) -> Future:
        return self.worker.flush()

    def activate(self) -> None:
        self.outputs.active = True

    def deactivate(self) -> None:
        """Publish nothing more; the map is kept."""
        with self.outputs.lock:
            self.outputs.active = False
            self._empty_inbox(INACTIVE)

    def close(self, timeout_s: float) -> bool:
        """
        Stop both threads, autosave and destroy the publishers; tell whether the worker has ended.

        Saved is also if the worker does not end: it adds nothing any more.
        """
        self.deactivate()
        self._info_subscription.close()
        deadline_s = time.monotonic() + timeout_s
        self.outputs.stop_thread(timeout_s)
        self._autosave()
        ended = self.worker.stop(max(0.0, deadline_s - time.monotonic()))
        if ended:  # else it may still publish
            self.outputs.destroy()
        return ended

    def _autosave(self) -> None:
        with self.outputs.lock:
            is_due = bool(self.params.autosave) and not self._is_autosaved
            self._is_autosaved = True
        if is_due:
            autosave(self.outputs, self.params.autosave, self._logger)

    def watchdog_limit_s(self) -> float:
        """Return how long one image may take, 0: for ever; on a CPU the warm-up gives a hint."""
        limit_s = self.params.watchdog_timeout
        if limit_s and choose_device(self.params.device).type == 'cpu':
            return max(limit_s, _WARM_UPS * self.worker.warm_up.seconds)
        return limit_s

    def state(self) -> str:
        """Return the state that /diagnostics shows."""
        worker = self.worker
        if worker.phase != SERVING:
            return worker.phase
        if not self.outputs.active:
            return 'READY'
        if worker.trouble:
            return 'ERROR'
        if self.paused:
            return 'PAUSED'
        idle = not len(self._inbox) and not worker.busy_s()
        if idle and self.ledger.seconds_since_arrival() > _SILENCE_S:
            return 'WAITING_FOR_IMAGES'
        if worker.initialized:
            return 'WAITING_FOR_SCALE' if worker.delivery.waits_for_scale else 'TRACKING'
        if worker.progress.is_static:
            return 'WAITING_FOR_MOTION'
        return f'{INITIALIZING} {worker.waiting}/{self.params.num_scale_frames}'
