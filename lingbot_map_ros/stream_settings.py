"""The engine's settings as the parameters give them; usable where there is no torch."""

from __future__ import annotations

from dataclasses import fields

from lingbot_map.config import PRESET_IMAGE_WIDTH, StreamConfig


def network_width(params) -> int:
    """Return the width of the network's input [px]: the parameter, or the model's own."""
    return params.image_width or PRESET_IMAGE_WIDTH[params.model]


def stream_config(params) -> StreamConfig:
    """
    Return the settings of the engine, whose names are those of the parameters.

    ValueError: values that do not go together.
    """
    values = {item.name: getattr(params, item.name) for item in fields(StreamConfig)}
    return StreamConfig(**values | {'image_width': network_width(params)})
