"""The node's process: signals, executor and exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CALLBACKS_S = 1.0  # for callbacks to end; they check `leaving` often
_WORKER_S = 4.0  # for the current image; loading cannot be interrupted
_POLL_S = 0.1
_USAGE = """\
usage: lingbot_map_node [--ros-args -p NAME:=VALUE ... -r FROM:=TO ... --params-file FILE]

Build a map from camera images: runs the lifecycle node 'lingbot_map' until Ctrl-C.
Parameters: python3 -m lingbot_map_ros.parameters --yaml
"""


def main(args: list[str] | None = None) -> int:
    """Run the node until a signal, a failed autostart or the watchdog; return the exit code."""
    words = [] if args is not None else _own_arguments(sys.argv[1:])
    if words:
        wanted = words[0] in ('-h', '--help')
        unknown = f"lingbot_map_node: '{words[0]}' is unknown; parameters come after --ros-args"
        (sys.stdout if wanted else sys.stderr).write(_USAGE if wanted else unknown + '\n')
        return 0 if wanted else 2
    received: list[int] = []  # not an Event: a second signal would deadlock on its lock
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    exit_code = _run(received, args)
    for number in _SIGNALS:  # a signal while Python exits must not kill it
        signal.signal(number, signal.SIG_IGN)
    return exit_code


def _own_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments outside of --ros-args ... --."""
    own, is_own = [], True
    for word in arguments:
        if word in ('--ros-args', '--'):
            is_own = word == '--'
        elif is_own:
            own.append(word)
    return own


def _run(received: list[int], args: list[str] | None) -> int:
    # Late import: it takes seconds, and signal handlers must be set before.
    import rclpy
    from rclpy.logging import get_logger
    from rclpy.signals import SignalHandlerOptions

    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    except RuntimeError as error:  # raised by rclpy for invalid arguments
        reason = ' '.join(str(error).split(', at ')[0].split())  # one line
        if reason.startswith('['):  # only the list of arguments
            reason = f'unknown ROS arguments: {reason}'
        sys.stderr.write(f'lingbot_map_node: {reason}\n')
        return 2
    from lingbot_map.settings import ParameterError
    from lingbot_map_ros.node import LingbotMapNode

    try:
        # Do not start if a signal arrived during the imports.
        return 0 if received else _spin(LingbotMapNode(), received)
    except ParameterError as error:
        get_logger('lingbot_map').fatal(str(error))
        return 1
    finally:
        rclpy.try_shutdown()


def _spin(node, received: list[int]) -> int:
    """
    Run the executor in its own thread, so that the main thread handles signals.

    Returns the exit code when the node leaves or `received` is not empty.
    """
    from lingbot_map_ros.rclpy_fixes import NodeExecutor

    executor = NodeExecutor()
    executor.add_node(node)
    spinner = threading.Thread(
        target=_execute, args=(executor, node), name='executor', daemon=True
    )
    spinner.start()
    try:
        while not (received or node.leaving.wait(_POLL_S)):
            if not spinner.is_alive():
                node.leave(1)
    finally:
        node.leave(0)
        executor.shutdown(timeout_sec=_CALLBACKS_S)
        ended = node.close(_WORKER_S)  # also autosaves
    if not ended:
        # A thread is in a call that cannot be interrupted; all files are written.
        sys.stderr.flush()
        os._exit(node.exit_code)
    executor.shutdown()  # a callback may still be writing a file
    spinner.join()
    node.destroy_node()
    return node.exit_code


def _execute(executor, node) -> None:
    from rclpy.impl.implementation_singleton import rclpy_implementation

    try:
        executor.spin()
    except rclpy_implementation.InvalidHandle:
        # On shutdown rclpy destroys a guard condition that the last callback still triggers.
        if not node.leaving.is_set():
            raise


if __name__ == '__main__':
    sys.exit(main())
