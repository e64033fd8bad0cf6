"""The process around the node: signals, executor, exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading

_CALLBACKS_S = 1.0  # for callbacks to end: they look at `leaving` often
_WORKER_S = 4.0  # for the image that is being processed; loading cannot be interrupted
_POLL_S = 0.1


def main(args: list[str] | None = None) -> int:
    """Run the node until a signal, a failed autostart or the watchdog; return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return _run(stop, args)


def _run(stop: threading.Event, args: list[str] | None) -> int:
    # Imported late: these take seconds, and a signal must find its handler by then.
    import rclpy
    from rclpy.logging import get_logger
    from rclpy.signals import SignalHandlerOptions

    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:  # what rclpy raises for arguments that it cannot read
        sys.stderr.write(f'lingbot_map_node: {str(error).split(", at ")[0]}\n')
        return 2
    from lingbot_map_ros.node import LingbotMapNode
    from lingbot_map_ros.parameter_spec import ParameterError

    try:
        return _spin(LingbotMapNode(), stop)
    except ParameterError as error:
        get_logger('lingbot_map').fatal(str(error))
        return 1
    finally:
        rclpy.try_shutdown()


def _spin(node, stop: threading.Event) -> int:
    """Run the executor in a thread of its own, so that signals reach the waiting main thread."""
    from rclpy.executors import MultiThreadedExecutor

    executor = MultiThreadedExecutor(2)
    executor.add_node(node)
    spinner = threading.Thread(target=executor.spin, name='executor', daemon=True)
    spinner.start()
    try:
        while not (stop.is_set() or node.leaving.wait(_POLL_S)):
            if not spinner.is_alive():
                node.leave(1)
    finally:
        node.leave(0)
        idle = executor.shutdown(timeout_sec=_CALLBACKS_S)
        ended = node.close(_WORKER_S)  # which autosaves
    if not (ended and idle):
        # A thread is inside a call that cannot be interrupted: nothing of ours is left to write.
        sys.stderr.flush()
        os._exit(node.exit_code)
    spinner.join()
    node.destroy_node()
    return node.exit_code


if __name__ == '__main__':
    sys.exit(main())
