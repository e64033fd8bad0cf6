"""Transitions, threads, states, parameters at run time, and the watchdog."""

import threading
from types import SimpleNamespace

from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import Gate
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from lingbot_map.streaming.checkpoint import CheckpointError
from lingbot_map.streaming.loading import weights_origin
from lingbot_map_ros.mapping.engine_status import WarmUpReport
from lingbot_map_ros.mapping.pipeline import Pipeline
from lingbot_map_ros.parameters import NodeParams
from node_rig import image, running, WAIT_S
import pytest
from rclpy.qos import ReliabilityPolicy

over_dds = pytest.mark.usefixtures('ros')


def change(rig, transition_id):
    request = ChangeState.Request(transition=Transition(id=transition_id))
    return rig.request(ChangeState, '/lingbot_map/change_state', request).success


def lifecycle_state(rig):
    return rig.request(GetState, '/lingbot_map/get_state', GetState.Request()).current_state.id


def newest_status(rig):
    return rig.heard['diagnostics'][-1].status[0]


def wait_status(rig, message):
    """Return the values of a status with this message that was published after the call."""
    count = len(rig.heard['diagnostics'])
    rig.wait(
        # The next one may be on its way already.
        lambda: (
            len(rig.heard['diagnostics']) > count + 1 and newest_status(rig).message == message
        ),
        f'diagnostics {message}',
    )
    return {pair.key: pair.value for pair in newest_status(rig).values}


@over_dds
def test_a_whole_life_by_hand_in_which_deactivating_keeps_the_map():
    """Diagnostics and services answer while the network loads."""
    release = threading.Event()
    with running(autostart=False, num_scale_frames=1) as rig:
        make_engine = rig.make_engine

        def slow(params):
            assert release.wait(WAIT_S)
            return make_engine(params)

        rig.node._engine_factory = slow
        for life in (1, 2):
            assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
            if life == 1:
                check_answers_while_loading(rig, release)
            else:
                assert change(rig, Transition.TRANSITION_CONFIGURE)
            assert rig.state() == 'READY'
            assert change(rig, Transition.TRANSITION_ACTIVATE)
            rig.wait_connected()
            rig.send(1.0)
            rig.wait_counts(1, 1)
            assert change(rig, Transition.TRANSITION_DEACTIVATE)
            assert change(rig, Transition.TRANSITION_ACTIVATE)
            rig.wait_connected()
            rig.send(2.0)
            rig.wait_counts(2, 2)
            rig.wait(lambda life=life: len(rig.heard['odometry']) == 2 * life)
            assert rig.heard['odometry'][-1].pose.pose.position.x == pytest.approx(1)
            pipeline = rig.node.pipeline
            pipeline.deactivate()  # while the callback of this image runs:
            pipeline.on_image(image(3.0))
            rig.wait_counts(3, 2, inactive=1)  # it does not enter the map
            assert rig.engine.pushed == 2
            rig.wait_for('processed', 3 * life)
            assert change(rig, Transition.TRANSITION_DEACTIVATE)
            assert change(rig, Transition.TRANSITION_CLEANUP)
            assert rig.node.pipeline is None
        assert len(rig.engines) == 2
        assert change(rig, Transition.TRANSITION_UNCONFIGURED_SHUTDOWN)


def check_answers_while_loading(rig, release):
    """Configure; the engine is loaded once `release` is set."""
    configured = rig.request_later(
        'change_state',
        ChangeState,
        ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CONFIGURE)),
    )
    wait_status(rig, 'LOADING')
    heard = len(rig.heard['diagnostics'])
    rig.wait_for('diagnostics', heard + 2)
    assert lifecycle_state(rig) == State.TRANSITION_STATE_CONFIGURING
    assert not change(rig, Transition.TRANSITION_CONFIGURE)
    assert not configured.done()
    release.set()
    rig.wait(configured.done)
    assert configured.result().success
    wait_status(rig, 'READY')


@over_dds
def test_a_failure_to_load_leaves_the_node_unconfigured_until_it_works(capfd):
    def fail(params):
        raise CheckpointError("checkpoint 'x.pt' is not a file; check the path")

    with running(autostart=False, max_keyframes=1, num_scale_frames=2, on_limit='stop') as rig:
        assert not change(rig, Transition.TRANSITION_ACTIVATE)
        assert not change(rig, 99)
        assert 'not possible now' in capfd.readouterr().err
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert "'max_keyframes' is 1" in capfd.readouterr().err
        assert rig.set_parameter('max_keyframes', 2).successful
        load, rig.node._engine_factory = rig.node._engine_factory, fail
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
        assert rig.node.pipeline is None
        rig.wait_for('diagnostics', len(rig.heard['diagnostics']) + 2)
        values = wait_status(rig, 'UNCONFIGURED')
        assert "'x.pt'" in values['last_error']
        assert newest_status(rig).level == DiagnosticStatus.ERROR
        log = capfd.readouterr().err
        before, _, after = log.partition("loading model 'demo' (packaged weights, trained on ")
        assert "'x.pt'" not in before and after.count("'x.pt'") == 1
        assert after.count('configure failed: ') == 1
        assert 'Traceback' not in log
        rig.node._engine_factory = lambda params: params.no_such_parameter
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
        assert 'AttributeError' in capfd.readouterr().err
        rig.node._engine_factory = load
        assert change(rig, Transition.TRANSITION_CONFIGURE)
        assert change(rig, Transition.TRANSITION_CLEANUP)
        rig.node._engine_factory = fail
        rig.node._autostart_timer = rig.probe.create_timer(1e6, lambda: None)
        rig.node._autostart()
        assert rig.node.leaving.is_set()
        assert rig.node.exit_code == 1


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        ({}, 'packaged weights, trained on rendered rooms: not for real images'),
        (
            {'model': 'full'},
            'no checkpoint is set, and there are no packaged weights for this model',
        ),
        ({'model': 'full', 'checkpoint': 'x.pt'}, 'x.pt'),
    ],
)
def test_where_the_weights_come_from_is_known_before_loading(values, words):
    assert weights_origin(NodeParams.from_values(values)) == words


@over_dds
def test_diagnostics_report_states_and_counts_and_one_thread_touches_the_engine():
    with running(num_scale_frames=2) as rig:
        wait_status(rig, 'WAITING_FOR_IMAGES')
        rig.send(1.0)
        wait_status(rig, 'INITIALIZING 1/2')
        rig.send(2.0, 2.0, 3.0)
        rig.wait_counts(4, 3, repeated_stamp=1)
        rig.send(4.0)
        rig.wait(
            lambda: (
                newest_status(rig).message == 'TRACKING'
                and {p.key: p.value for p in newest_status(rig).values}['keyframes'] == '4'
            )
        )
        values = {pair.key: pair.value for pair in newest_status(rig).values}
        assert (values['images_in'], values['dropped.repeated_stamp']) == ('5', '1')
        assert (values['images_out'], values['images_waiting']) == ('4', '0')
        assert float(values['latency_arrival_p50_ms']) > 0
        assert newest_status(rig).name == 'lingbot_map'
        wait_status(rig, 'WAITING_FOR_IMAGES')  # nothing comes any more
        rig.call('reset')
        rig.send(5.0)
        rig.wait_for('processed', 6)
        rig.call('flush')
        engine = rig.engine
        assert len(engine.threads) == 1  # from loading to release
        assert threading.get_ident() not in engine.threads
        assert engine.inference_modes == {True}
        assert {t.ident for t in threading.enumerate() if t.name == 'worker'} == engine.threads


@over_dds
def test_a_map_whose_images_are_all_dropped_says_so_and_why():
    with running(num_scale_frames=2) as rig:
        rig.send(1.0, 2.0, frame_id='')
        rig.send(3.0, encoding='foo8')
        rig.wait_counts(3, 0, frame_id=2, bad_image=1)
        why = 'all images dropped (frame_id 2, bad_image 1)'
        values = wait_status(rig, f'INITIALIZING 0/2: {why}')
        assert newest_status(rig).level == DiagnosticStatus.WARN
        assert (values['state'], values['trouble']) == ('INITIALIZING 0/2', why)
        rig.send(4.0)
        assert wait_status(rig, 'INITIALIZING 1/2')['trouble'] == ''
        rig.send(5.0, 6.0)
        rig.send(7.0, frame_id='')
        rig.wait_counts(7, 3, frame_id=3, bad_image=1)
        wait_status(rig, 'TRACKING')  # some got through
        rig.call('reset')
        rig.send(8.0, frame_id='map')
        wait_status(rig, 'INITIALIZING 0/2: all images dropped (frame_id 1)')


@over_dds
def test_an_idle_node_refuses_fixed_parameters_and_is_no_concern_of_the_watchdog():
    qos = {'qos_overrides./image.subscription.reliability': 'reliable'}
    with running(num_scale_frames=1, queue='latest', watchdog_timeout=0.1, **qos) as rig:
        heard = len(rig.heard['diagnostics'])
        (info,) = rig.probe.get_subscriptions_info_by_topic('/image')
        assert info.qos_profile.reliability == ReliabilityPolicy.RELIABLE
        result = rig.set_parameter('scale', 2.0)
        assert not result.successful
        assert 'cleanup' in result.reason
        assert rig.set_parameter('scale', 1.0).successful  # no change
        assert rig.node.get_parameter('scale').value == 1.0
        for name, value in (('keyframe_interval', 0), ('points.stride', 'two')):
            assert not rig.set_parameter(name, value).successful
        assert rig.set_parameter('path.publish_rate', 5).successful
        assert rig.node.pipeline.params.path.publish_rate == 5.0
        rig.wait_for('diagnostics', heard + 3)
        assert not rig.node.leaving.is_set()


@over_dds
def test_the_watchdog_asks_to_leave_with_exit_code_1(capfd):
    gate = Gate(at=1)
    with running(num_scale_frames=1, watchdog_timeout=0.5, engine={'before_push': gate}) as rig:
        rig.send(1.0, 2.0)
        assert rig.node.leaving.wait(WAIT_S)
        assert rig.node.exit_code == 1
        wait_status(rig, 'ERROR')
        rig.wait(lambda: rig.counts().received == 2)
        assert change(rig, Transition.TRANSITION_DEACTIVATE)
        gate.open()
        rig.wait_counts(2, 0, inactive=2)  # counted and not published
        assert not rig.heard['odometry']
    assert 'watchdog_timeout' in capfd.readouterr().err


@over_dds
def test_a_worker_error_is_shown_until_an_image_gets_through(capfd):
    broken = threading.Event()

    def fail(n):
        if broken.is_set():
            raise RuntimeError('the device is unhappy')

    with running(num_scale_frames=2, engine={'before_push': fail}) as rig:
        broken.set()
        rig.send(*range(1, 31))
        rig.wait_counts(30, 0, worker_error=30)
        rig.wait_for('diagnostics', len(rig.heard['diagnostics']) + 2)
        values = wait_status(rig, 'ERROR')
        assert 'the device is unhappy' in values['trouble']
        assert values['worker_errors'] == '30'
        assert newest_status(rig).level == DiagnosticStatus.ERROR
        broken.clear()
        rig.send(31.0)
        rig.wait(lambda: rig.state() == 'INITIALIZING 1/2')
    assert capfd.readouterr().err.count('the device is unhappy') < 5


@pytest.mark.parametrize(
    ('timeout_s', 'warm_up_s', 'limit_s'), [(1.0, 30.0, 120.0), (1.0, 0.1, 1.0), (0.0, 30.0, 0.0)]
)
def test_the_watchdog_is_patient_with_a_cpu_whose_warm_up_took_long(timeout_s, warm_up_s, limit_s):
    pipeline = SimpleNamespace(
        params=NodeParams.from_values({'watchdog_timeout': timeout_s, 'device': 'cpu'}),
        worker=SimpleNamespace(warm_up=WarmUpReport(320, seconds=warm_up_s)),
    )
    assert Pipeline.watchdog_limit_s(pipeline) == limit_s
