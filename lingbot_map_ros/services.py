"""The services of the node. A service that fails returns the reason in its message."""

from __future__ import annotations

from collections.abc import Callable

from lingbot_map_ros.mapping.pipeline import Pipeline
from lingbot_map_ros.output.saving import NothingToSave, save_map, save_trajectory, unwritable
from rclpy.callback_groups import ReentrantCallbackGroup
from std_srvs.srv import SetBool, Trigger


class Services:
    """Offers services on `node.pipeline` (None: not configured); waits with `node.wait_for`."""

    def __init__(self, node):
        self._node = node
        group = ReentrantCallbackGroup()  # a reset must not wait for a flush
        for name, kind, answer in (
            ('~/reset', Trigger, self._reset),
            ('~/flush', Trigger, self._flush),
            ('~/pause', SetBool, self._pause),
            ('~/save_map', Trigger, self._save_map),
            ('~/save_trajectory', Trigger, self._save_trajectory),
        ):
            node.create_service(kind, name, self._when_configured(answer), callback_group=group)

    def _when_configured(self, answer: Callable) -> Callable:
        def callback(request, response):
            pipeline = self._node.pipeline
            if pipeline is None:
                response.message = 'the node is not configured: run the transition configure'
            else:
                response.success, response.message = answer(pipeline, request)
            return response

        return callback

    def _reset(self, pipeline: Pipeline, _request) -> tuple[bool, str]:
        pipeline.reset()
        return True, 'a new map starts with the next image'

    def _flush(self, pipeline: Pipeline, _request) -> tuple[bool, str]:
        done = pipeline.flush()
        if not self._node.wait_for(done):
            return False, 'the node is stopping'
        if done.exception():
            return False, str(done.exception())
        return (
            True,
            f'{done.result()} images of an unfinished scale batch were processed; none is waiting',
        )

    def _pause(self, pipeline: Pipeline, request) -> tuple[bool, str]:
        pipeline.paused = request.data
        return True, 'paused: images are ignored' if request.data else 'resumed in the same map'

    def _save_map(self, pipeline: Pipeline, _request) -> tuple[bool, str]:
        return _saved(pipeline, save_map)

    def _save_trajectory(self, pipeline: Pipeline, _request) -> tuple[bool, str]:
        return _saved(pipeline, save_trajectory)


def _saved(pipeline: Pipeline, save: Callable) -> tuple[bool, str]:
    try:
        files = save(pipeline.outputs.current, pipeline.params.save_directory)
    except NothingToSave as error:
        return False, str(error)
    except OSError as error:
        return False, unwritable('save_directory', pipeline.params.save_directory, error)
    return True, ', '.join(map(str, files))
