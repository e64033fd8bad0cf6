"""Which values of parameters do not go together."""

from __future__ import annotations

from lingbot_map_ros.parameter_spec import ParameterError
from lingbot_map_ros.stream_settings import stream_config

_FRAMES = {  # those that a tf_mode needs
    'off': ('map_frame',),
    'map_to_camera': ('map_frame',),
    'map_to_base': ('map_frame', 'base_frame'),
    'map_to_odom': ('map_frame', 'odom_frame', 'base_frame'),
}


def check_frames(params) -> None:
    """Raise ParameterError if a frame that tf_mode needs has no name of its own."""
    names = {name: getattr(params, name) for name in _FRAMES[params.tf_mode]}
    for name, frame in names.items():
        if not frame.strip('/'):
            raise ParameterError(
                f"parameter '{name}' is empty: tf_mode '{params.tf_mode}' needs it"
            )
        if frame.startswith('/'):
            raise ParameterError(
                f"parameter '{name}' is '{frame}': frame ids do not begin with a slash"
            )
    if len(set(names.values())) < len(names):
        same = ', '.join(f"'{name}' ({frame})" for name, frame in names.items())
        raise ParameterError(f'parameters {same}: two of them are the same frame')


def check_scale(params) -> None:
    """Raise ParameterError if a robot would be placed in a map without metres."""
    needs_metres = params.tf_mode in ('map_to_base', 'map_to_odom')
    if needs_metres and params.scale_source == 'fixed' and params.scale == 1.0:
        raise ParameterError(
            f"parameter 'tf_mode' is '{params.tf_mode}', which needs metres, but 'scale' is 1.0 "
            "(unknown): set 'scale' to metres per network unit, or 'scale_source' to 'odometry'"
        )


def check_stream(params) -> None:
    """Raise ParameterError if the memory cannot work as it is sized, or a policy lacks a value."""
    try:
        stream_config(params)
    except ValueError as error:
        raise ParameterError(f'parameter {error}') from None
