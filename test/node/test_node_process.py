"""The process: exit codes and signals, with the real engine."""

from pathlib import Path
import signal
import subprocess
import sys
import threading
import time

from node_rig import image
from program import Program
import pytest
import rclpy
from sensor_msgs.msg import Image

WAIT_S = 60.0
_QOS = 'qos_overrides./image.subscription'
_READY = 'waiting for images'
_RANDOM = ('-p', 'model:=tiny', '-p', 'checkpoint:=random', '-p', 'image_width:=28')


def start(*arguments):
    command = [sys.executable, '-m', 'lingbot_map_ros.main', '--ros-args', *arguments]
    return subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)


def wait_for_line(process, words):
    """Read the output up to the first line that holds `words`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f'{words!r} did not come:\n' + ''.join(lines))


def end(process):
    """Return the exit code and the rest of the output, once the process has ended."""
    output, _ = process.communicate(timeout=WAIT_S)
    assert 'Traceback' not in output, output
    return process.returncode, output


@pytest.mark.parametrize('numbers', [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_a_signal_ends_a_running_node_with_0(tmp_path, numbers):
    program = Program(tmp_path, *_RANDOM)
    program.wait_for_line(_READY)
    assert 'weights are random' in program.output
    for number in numbers:
        program.send_signal(number)
    assert program.end()[0] == 0


def test_signals_that_come_again_and_again_change_nothing():
    process = start(*_RANDOM)
    wait_for_line(process, _READY)
    while process.poll() is None:  # while it ends, and while Python itself does
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        time.sleep(0.001)
    assert end(process)[0] == 0


def stay(_number):
    threading.Event().wait()


def test_a_stuck_engine_ends_the_process_with_1(ros, tmp_path):
    program = Program(tmp_path, '-p', 'watchdog_timeout:=0.5', before_push=stay)
    program.wait_for_line(_READY)
    camera = rclpy.create_node('camera')
    publisher = camera.create_publisher(Image, '/image', 1)
    try:
        stamp_s = 1.0
        while not program.has_ended:  # until it is discovered
            publisher.publish(image(stamp_s))
            stamp_s += 1.0
            time.sleep(0.1)
    finally:
        camera.destroy_node()
    returncode, output = program.end()
    assert returncode == 1
    assert 'watchdog_timeout' in output


def test_signals_while_the_node_starts_end_it_with_0():
    importing = start(*_RANDOM)
    wait_until_handled(importing)
    interrupt_twice(importing)
    returncode, output = end(importing)
    assert returncode == 0
    assert 'loading model' not in output
    loading = start(*_RANDOM)
    wait_for_line(loading, 'loading model')
    interrupt_twice(loading)
    assert end(loading)[0] == 0


def interrupt_twice(process):
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)


def wait_until_handled(process):
    """Wait until the process has its handlers: Python itself has none for SIGTERM."""
    caught = 0
    while not caught >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.01)
        status = Path(f'/proc/{process.pid}/status').read_text()
        caught = int(status.split('SigCgt:')[1].split()[0], 16)


def test_bad_starts_say_why_in_one_line(tmp_path):
    (tmp_path / 'broken.yaml').write_text('/**:\n  ros__parameters: [1, {')
    cases = [
        (('-p', f'checkpoint:={tmp_path}/no.pt'), 1, 'no.pt'),
        (('-p', 'model:=full'), 1, 'packaged weights'),
        (('-p', 'queue:=fifo'), 1, "parameter 'queue' is 'fifo'"),
        (('-p', 'device:=cuda:77', '-p', 'checkpoint:=random'), 1, 'cuda:77'),
        (('--params-file', f'{tmp_path}/broken.yaml'), 2, 'broken.yaml'),
        (('--params-file', f'{tmp_path}/no.yaml'), 2, 'no.yaml'),
        (('--no-such-flag',), 2, "unknown ROS arguments: ['--no-such-flag']"),
        (('-p', 'use_sim_time:=5'), 1, "'use_sim_time' to '5' of type 'INTEGER', expecting"),
        (('-p', f'{_QOS}.reliability:=maybe', *_RANDOM), 1, f"'{_QOS}.reliability' is 'maybe'"),
        (('-p', f'{_QOS}.depth:=-1', *_RANDOM), 1, f"'{_QOS}.depth' is -1"),
    ]
    for number, (arguments, code, words) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        returncode, output = Program(folder, *arguments).end()
        assert returncode == code, (arguments, output)
        assert words in output, (arguments, output)


@pytest.mark.parametrize(('word', 'code'), [('--help', 0), ('-h', 0), ('--model', 2), ('x', 2)])
def test_words_outside_of_ros_arguments_never_start_a_node(word, code):
    command = [sys.executable, '-m', 'lingbot_map_ros.main', word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == code
    assert '--ros-args' in (done.stderr if code else done.stdout)
