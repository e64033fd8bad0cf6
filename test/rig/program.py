"""
The node's program for tests, forked by one process that has imported torch and rclpy already.

Starting Python with these takes four seconds of a processor. What happens during that time, and
how Python itself ends, needs a process of its own: see test_node_process.py.
"""

from collections.abc import Callable
import multiprocessing
import os
from pathlib import Path
import sys
import time

from fake_engine import FakeEngine

WAIT_S = 60.0
_POLL_S = 0.02
_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(['lingbot_map_ros.main', 'lingbot_map_ros.node', 'fake_engine'])


class Program:
    """`lingbot_map_node` with ROS arguments, and all that it prints in the file `output`."""

    def __init__(self, folder: Path, *arguments: str, before_push: Callable | None = None):
        self._output = folder / 'output.txt'
        self._output.touch()
        self._process = _CONTEXT.Process(
            target=_run, args=(str(self._output), arguments, before_push)
        )
        self._process.start()

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for_line(self, words: str) -> None:
        """Wait until it has printed `words`."""
        deadline_s = time.monotonic() + WAIT_S
        while words not in self.output:
            assert not self.has_ended and time.monotonic() < deadline_s, self.output
            time.sleep(_POLL_S)

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """Return the exit code and the output, once it has ended without a traceback."""
        self._process.join(WAIT_S)
        if not self.has_ended:
            self._process.kill()
            self._process.join()
            raise AssertionError(f'it has not ended:\n{self.output}')
        assert 'Traceback' not in self.output, self.output
        return self._process.exitcode, self.output


def _run(output: str, arguments: tuple[str, ...], before_push: Callable | None) -> None:
    """Run the program in this process, with a FakeEngine if `before_push` is given."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from lingbot_map_ros import main, node

    if before_push is not None:
        node.LingbotMapNode = _with_fake_engine(node.LingbotMapNode, before_push)
    sys.argv = ['lingbot_map_node', '--ros-args', *arguments]
    code = main.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _with_fake_engine(base: type, before_push: Callable) -> type:
    class Node(base):
        def __init__(self):
            super().__init__(lambda params: FakeEngine(params, before_push=before_push))

        def on_shutdown(self, state):
            print('on_shutdown was called', flush=True)  # noqa: T201
            return super().on_shutdown(state)

    return Node
