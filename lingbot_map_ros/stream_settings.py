"""The engine's settings as the parameters give them; usable where there is no torch."""

from __future__ import annotations

from dataclasses import fields

from lingbot_map.config import PRESET_IMAGE_WIDTH, StreamConfig


def network_width(params) -> int:
    """Return the width of the network's input [px]: the parameter, or the model's own."""
    return params.image_width or PRESET_IMAGE_WIDTH[params.model]


def usual_image_size(params) -> tuple[int, int]:
    """Return (height, width) of upright images of most cameras, 4:3, as wide as the network's."""
    width, upright = network_width(params), params.image_rotation % 180 == 0
    return (width * 3 // 4 if upright else width * 4 // 3), width


def stream_config(params) -> StreamConfig:
    """
    Return the settings of the engine, whose names are those of the parameters.

    ValueError: values that do not go together.
    """
    values = {item.name: getattr(params, item.name) for item in fields(StreamConfig)}
    return StreamConfig(**values | {'image_width': network_width(params)})
