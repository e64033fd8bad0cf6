"""Copies of the engine's status for threads that must not use the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lingbot_map.streaming.compiling import compilations
from lingbot_map.streaming.engine import StreamEngine


@dataclass(frozen=True)
class Progress:
    """Attributes of StreamEngine with the same names, copied after an image."""

    frames: int = 0
    keyframes: int = 0
    held_keyframes: int = 0
    window: int = 0
    last_scale_step: float = 1.0
    last_residual: float = 0.0
    is_static: bool = False
    gated_frames: int = 0

    @classmethod
    def of(cls, engine) -> Progress:
        return cls(**{item.name: getattr(engine, item.name) for item in fields(cls)})


@dataclass(frozen=True)
class WarmUpReport:
    """The result of a warm-up; empty and zero before the first one."""

    max_keyframes: int  # keyframe capacity; lower than configured if fit_memory reduced it
    seconds: float = 0.0
    size: tuple[int, int] | None = None  # of the network's input, width and height [px]
    compile_mode: str = ''  # the mode that runs, never auto
    attention_backend: str = ''
    compilations: int | None = None  # in the process until the end of the warm-up

    @classmethod
    def of(cls, engine: StreamEngine, size: tuple[int, int], seconds: float) -> WarmUpReport:
        """Describe an engine that has just been warmed up."""
        return cls(
            engine.max_keyframes,
            seconds,
            size,
            engine.compile_mode,
            engine.attention_backend,
            compilations(),
        )

    @property
    def recompiles(self) -> int:
        """Number of graphs compiled or captured since the warm-up."""
        return 0 if self.compilations is None else compilations() - self.compilations

    def __str__(self) -> str:
        return (
            f'warmed up for {"x".join(map(str, self.size))} pixels in {self.seconds:.1f} s '
            f'(compile_mode {self.compile_mode}, attention_backend {self.attention_backend})'
        )
