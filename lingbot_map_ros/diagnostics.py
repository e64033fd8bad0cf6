"""The status of the node on /diagnostics, published once a second."""

from __future__ import annotations

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue
from lingbot_map_ros.frame import DROP_REASONS
from lingbot_map_ros.input.image_topic import ImageTopic
from lingbot_map_ros.mapping.map_session import State
from lingbot_map_ros.mapping.pipeline import Pipeline
import numpy as np

_TROUBLE_SHOWN_S = 5.0


def idle_status(name: str, last_error: str) -> DiagnosticStatus:
    """Return the status of an unconfigured node; `last_error` is why configuring failed, or ''."""
    level = DiagnosticStatus.ERROR if last_error else DiagnosticStatus.OK
    return DiagnosticStatus(
        level=level,
        name=name,
        message=State.UNCONFIGURED.value,
        values=_pairs({'last_error': last_error}),
    )


def status(name: str, pipeline: Pipeline) -> DiagnosticStatus:
    """Return the status of a configured node; its message is the state and what blocks it."""
    state, session = pipeline.state(), pipeline.session
    text, refusal = state_text(pipeline), ''
    if state is State.INITIALIZING:
        refusal = pipeline.ledger.refusal(session.counts_before)
    values = {'state': text, 'trouble': _trouble(pipeline) or refusal}
    for part in (_settings, _counts, _pace, _progress):
        values |= part(pipeline)
    return DiagnosticStatus(
        level=_level(state, refusal, pipeline),
        name=name,
        message=f'{text}: {refusal}' if refusal else text,
        values=_pairs(values),
    )


def state_text(pipeline: Pipeline) -> str:
    """Return the name of the state, for INITIALIZING with the progress of the scale batch."""
    state = pipeline.state()
    if state is not State.INITIALIZING:
        return state.value
    return f'{state.value} {len(pipeline.session.held)}/{pipeline.params.num_scale_frames}'


def add_reception(status: DiagnosticStatus, topic: ImageTopic, silence: str) -> None:
    """Add the publishers of images and why none arrive to the status of an active node."""
    if topic.incompatible:
        status.level = DiagnosticStatus.ERROR
    elif silence and status.level == DiagnosticStatus.OK:
        status.level = DiagnosticStatus.STALE
    status.values += _pairs(
        {
            'image_topic': topic.name,
            'image_publishers_heard': topic.matched,
            'image_publishers_not_heard': '; '.join(
                f'{name} on {topic.name}: {why}' for name, why in topic.incompatible.items()
            ),
            'images_lost_on_the_way': topic.lost,
            'silence': silence,
        }
    )


def _level(state: State, refusal: str, pipeline: Pipeline) -> bytes:
    if state in (State.ERROR, State.ENDED) or _trouble(pipeline):
        return DiagnosticStatus.ERROR
    if refusal or pipeline.ledger.seconds_since_trouble() < _TROUBLE_SHOWN_S:
        return DiagnosticStatus.WARN
    return DiagnosticStatus.OK


def _settings(pipeline: Pipeline) -> dict[str, object]:
    params, worker = pipeline.params, pipeline.worker
    return {
        'model': params.model,
        'checkpoint': params.checkpoint or 'packaged',
        'device': params.device,
        'compile_mode': worker.warm_up.compile_mode or params.compile_mode,
        'attention_backend': worker.warm_up.attention_backend or params.attention_backend,
        'queue': params.queue,
        'camera_info': pipeline.images.camera_status,
        'tf_mode': params.tf_mode,
        'scale': pipeline.session.scale_status,
    }


def _counts(pipeline: Pipeline) -> dict[str, object]:
    counts = pipeline.ledger.counts()
    values = {
        'images_in': counts.received,
        'images_out': counts.out,
        'images_waiting': counts.waiting,
        'images_while_paused': counts.paused,
    }
    values |= {f'dropped.{reason}': counts.dropped.get(reason, 0) for reason in DROP_REASONS}
    values['bad_images'] = ', '.join(f'{kind}: {n}' for kind, n in pipeline.ledger.kinds().items())
    return values | pipeline.ledger.events()


def _pace(pipeline: Pipeline) -> dict[str, object]:
    pace = pipeline.ledger.pace()
    values = {
        'input_rate_hz': f'{pace.input_hz:.1f}',
        'output_rate_hz': f'{pace.output_hz:.1f}',
        'warm_up_s': f'{pipeline.worker.warm_up.seconds:.1f}',
        'recompiles': pipeline.worker.warm_up.recompiles,
        'initial_latency_ms': f'{pace.initial_ms:.1f}',
        'forward_ms': f'{pipeline.worker.forward_ms:.1f}',
    }
    for name, latencies_ms in (('arrival', pace.arrival_ms), ('stamp', pace.stamp_ms)):
        for p in (50, 95, 99) if latencies_ms else ():
            values[f'latency_{name}_p{p}_ms'] = f'{np.percentile(latencies_ms, p):.1f}'
    return values


def _progress(pipeline: Pipeline) -> dict[str, object]:
    worker, session = pipeline.worker, pipeline.session
    progress = session.progress
    limit = worker.warm_up.max_keyframes
    memory = {'gpu_memory_mib': f'{worker.gpu_memory_mib:.0f}'} if worker.gpu_memory_mib else {}
    return memory | {
        'frames': progress.frames,
        'keyframes': progress.keyframes,
        'max_keyframes': limit,
        'held_keyframes': progress.held_keyframes,
        'cache_fill': f'{progress.held_keyframes / limit:.0%}',
        'gated_frames': progress.gated_frames,
        'window': progress.window,
        'last_scale_step': f'{progress.last_scale_step:.4f}',
        'last_residual': f'{progress.last_residual:.4f}',
        'map_number': session.number,
        'map_points': len(session.points),
        'worker_errors': worker.errors,
        'publishing_errors': pipeline.outputs.errors,
    }


def _trouble(pipeline: Pipeline) -> str:
    session, transform = pipeline.session, pipeline.outputs.transform
    of_transform = '' if transform is None else transform.trouble
    return session.trouble or of_transform or session.scale_trouble


def _pairs(values: dict[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=str(value)) for key, value in values.items()]
