"""How far the engine is in the present map, for threads that must not touch the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Progress:
    """What the engine says of itself under the same names (see StreamEngine)."""

    frames: int = 0
    keyframes: int = 0
    held_keyframes: int = 0
    window: int = 0
    last_scale_step: float = 1.0
    last_residual: float = 0.0
    standing: bool = False
    gated_frames: int = 0

    @classmethod
    def of(cls, engine) -> Progress:
        return cls(**{item.name: getattr(engine, item.name) for item in fields(cls)})
