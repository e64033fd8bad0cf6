"""Answers to lifecycle requests that the present state does not allow."""

from __future__ import annotations

from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNodeMixin


def answer_bad_transitions(node: LifecycleNodeMixin) -> None:
    """
    Answer a transition that is not possible now with success=False.

    rclpy 7.1 raises in the service callback instead: the caller never hears, the executor dies.
    """
    service = node._service_change_state
    change_state = service.callback

    def answer(request, response):
        try:
            return change_state(request, response)
        except rclpy_implementation.RCLError as error:
            reason = str(error).split(', at ')[0]
            node.get_logger().error(
                f'transition {request.transition.label or request.transition.id} is not possible '
                f'now: {reason}'
            )
            response.success = False
            return response

    service.callback = answer
