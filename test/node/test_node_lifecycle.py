"""Transitions, threads, states, parameters at run time, and the watchdog."""

from dataclasses import replace
import threading

from diagnostic_msgs.msg import DiagnosticStatus
from fake_engine import Gate
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from lingbot_map.streaming.checkpoint import CheckpointError
from node_rig import image, running, WAIT_S
import pytest
from rclpy.qos import ReliabilityPolicy

pytestmark = pytest.mark.usefixtures('ros')


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


def test_an_image_that_arrives_during_the_deactivation_does_not_enter_the_map():
    with running(num_scale_frames=1) as rig:
        rig.send(1.0)
        rig.wait_counts(1, 1)
        pipeline = rig.node.pipeline
        pipeline.deactivate()  # while the callback of this image runs:
        pipeline.on_image(image(2.0))
        rig.wait_counts(2, 1, inactive=1)
        assert rig.engine.pushed == 1
        rig.wait_for('processed', 2)


def test_a_whole_life_by_hand_in_which_deactivating_keeps_the_map():
    with running(autostart=False, num_scale_frames=1) as rig:
        for life in (1, 2):
            assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
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
            assert change(rig, Transition.TRANSITION_DEACTIVATE)
            assert change(rig, Transition.TRANSITION_CLEANUP)
            assert rig.node.pipeline is None
        assert len(rig.engines) == 2
        assert change(rig, Transition.TRANSITION_UNCONFIGURED_SHUTDOWN)


def test_an_image_in_the_engine_while_deactivating_is_counted_and_not_published():
    gate = Gate(at=1)
    with running(num_scale_frames=1, engine={'before_push': gate}) as rig:
        rig.send(1.0, 2.0)
        assert gate.reached.wait(WAIT_S)
        rig.wait(lambda: rig.counts().received == 2)
        assert change(rig, Transition.TRANSITION_DEACTIVATE)
        gate.open()
        rig.wait_counts(2, 0, inactive=2)
        assert not rig.heard['odometry']


def test_a_failure_to_load_leaves_the_node_unconfigured_until_it_works(capfd):
    with running(autostart=False) as rig:
        load = rig.node._engine_factory

        def fail(params):
            raise CheckpointError("checkpoint 'x.pt' is not a file; check the path")

        rig.node._engine_factory = fail
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
        values = wait_status(rig, 'UNCONFIGURED')
        assert "'x.pt'" in values['last_error']
        assert newest_status(rig).level == DiagnosticStatus.ERROR
        rig.node._engine_factory = load
        assert change(rig, Transition.TRANSITION_CONFIGURE)
    log = capfd.readouterr().err
    assert log.count("'x.pt'") == 1
    assert 'Traceback' not in log


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
def test_the_log_says_before_loading_where_the_weights_come_from(capfd, values, words):
    with running(autostart=False, **values) as rig:
        assert change(rig, Transition.TRANSITION_CONFIGURE)
    assert f"loading model '{values.get('model', 'demo')}' ({words})" in capfd.readouterr().err


def test_an_unexpected_error_while_loading_is_a_failure_with_its_place(capfd):
    with running(autostart=False) as rig:
        rig.node._engine_factory = lambda params: params.no_such_parameter
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert lifecycle_state(rig) == State.PRIMARY_STATE_UNCONFIGURED
    assert 'AttributeError' in capfd.readouterr().err


def test_a_failed_autostart_asks_for_exit_code_1():
    with running(autostart=False) as rig:
        rig.node._engine_factory = lambda params: 1 / 0
        rig.node._autostart_timer = rig.probe.create_timer(1e6, lambda: None)
        rig.node._autostart()
        assert rig.node.leaving.is_set()
        assert rig.node.exit_code == 1


def test_what_cannot_be_configured_or_is_not_possible_now_is_answered(capfd):
    with running(autostart=False, max_keyframes=1, num_scale_frames=2, on_limit='stop') as rig:
        assert not change(rig, Transition.TRANSITION_ACTIVATE)
        assert not change(rig, 99)
        assert not change(rig, Transition.TRANSITION_CONFIGURE)
        assert rig.set_parameter('max_keyframes', 2).successful
        assert change(rig, Transition.TRANSITION_CONFIGURE)
    log = capfd.readouterr().err
    assert "'max_keyframes' is 1" in log
    assert 'not possible now' in log


def test_one_thread_touches_the_engine_from_loading_to_release():
    with running(num_scale_frames=2) as rig:
        rig.send(1.0, 2.0, 3.0)
        rig.wait_counts(3, 3)
        rig.call('reset')
        rig.send(4.0)
        rig.wait_for('processed', 4)
        rig.call('flush')
        engine = rig.engine
        assert len(engine.threads) == 1
        assert threading.get_ident() not in engine.threads
        assert engine.inference_modes == {True}
        assert {t.ident for t in threading.enumerate() if t.name == 'worker'} == engine.threads


def test_diagnostics_and_services_answer_while_the_network_loads():
    release = threading.Event()
    with running(autostart=False, num_scale_frames=1) as rig:
        make_engine = rig.make_engine

        def slow(params):
            assert release.wait(WAIT_S)
            return make_engine(params)

        rig.node._engine_factory = slow
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


def test_diagnostics_report_states_and_counts():
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
                and {p.key: p.value for p in newest_status(rig).values}['images_out'] == '4'
            )
        )
        values = {pair.key: pair.value for pair in newest_status(rig).values}
        assert (values['images_in'], values['dropped.repeated_stamp']) == ('5', '1')
        assert values['images_waiting'] == '0'
        assert values['keyframes'] == '4'
        assert float(values['latency_arrival_p50_ms']) > 0
        assert newest_status(rig).name == 'lingbot_map'
        wait_status(rig, 'WAITING_FOR_IMAGES')  # nothing comes any more


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


def test_fixed_parameters_are_refused_with_the_remedy_while_configured():
    with running(num_scale_frames=1) as rig:
        result = rig.set_parameter('scale', 2.0)
        assert not result.successful
        assert 'cleanup' in result.reason
        assert rig.set_parameter('scale', 1.0).successful  # no change
        assert rig.node.get_parameter('scale').value == 1.0
        for name, value in (('keyframe_interval', 0), ('points.stride', 'two')):
            assert not rig.set_parameter(name, value).successful
        assert rig.set_parameter('path.publish_rate', 5).successful
        assert rig.node.pipeline.params.path.publish_rate == 5.0


def test_the_watchdog_asks_to_leave_with_exit_code_1(capfd):
    gate = Gate(at=1)
    with running(num_scale_frames=1, watchdog_timeout=0.5, engine={'before_push': gate}) as rig:
        rig.send(1.0)
        assert rig.node.leaving.wait(WAIT_S)
        assert rig.node.exit_code == 1
        wait_status(rig, 'ERROR')
        gate.open()
    assert 'watchdog_timeout' in capfd.readouterr().err


def test_an_error_at_every_image_does_not_fill_the_log(capfd):
    def fail(n):
        raise RuntimeError('the device is unhappy')

    with running(num_scale_frames=1, engine={'before_push': fail}) as rig:
        rig.send(*range(1, 31))
        rig.wait_counts(30, 0, worker_error=30)
        assert rig.diagnostic('worker_errors') == '30'
    assert capfd.readouterr().err.count('the device is unhappy') < 5


def test_a_worker_error_is_shown_until_an_image_gets_through():
    broken = threading.Event()

    def fail(n):
        if broken.is_set():
            raise RuntimeError('the device is unhappy')

    with running(num_scale_frames=2, engine={'before_push': fail}) as rig:
        broken.set()
        rig.send(1.0, 2.0)
        rig.wait_counts(2, 0, worker_error=2)
        values = wait_status(rig, 'ERROR')
        assert 'the device is unhappy' in values['trouble']
        assert newest_status(rig).level == DiagnosticStatus.ERROR
        broken.clear()
        rig.send(3.0)
        rig.wait(lambda: rig.state() == 'INITIALIZING 1/2')


def test_the_quality_of_service_of_images_can_be_overridden():
    name = 'qos_overrides./image.subscription.reliability'
    with running(queue='latest', **{name: 'reliable'}) as rig:
        (info,) = rig.probe.get_subscriptions_info_by_topic('/image')
        assert info.qos_profile.reliability == ReliabilityPolicy.RELIABLE


def test_an_idle_node_is_no_concern_of_the_watchdog():
    with running(num_scale_frames=1, watchdog_timeout=0.1) as rig:
        rig.wait_for('diagnostics', len(rig.heard['diagnostics']) + 3)
        assert not rig.node.leaving.is_set()


def test_the_watchdog_is_patient_with_a_cpu_whose_warm_up_took_long():
    with running(num_scale_frames=1, watchdog_timeout=1.0) as rig:
        worker = rig.node.pipeline.worker
        worker.warm_up = replace(worker.warm_up, seconds=30.0)
        assert rig.node.pipeline.watchdog_limit_s() == 120.0
        worker.warm_up = replace(worker.warm_up, seconds=0.1)
        assert rig.node.pipeline.watchdog_limit_s() == 1.0
    with running(num_scale_frames=1, watchdog_timeout=0.0) as rig:
        worker = rig.node.pipeline.worker
        worker.warm_up = replace(worker.warm_up, seconds=30.0)
        assert rig.node.pipeline.watchdog_limit_s() == 0.0
