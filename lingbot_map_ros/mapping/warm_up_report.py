"""What the newest warm-up came to, for threads that must not touch the engine."""

from __future__ import annotations

from dataclasses import dataclass

from lingbot_map.streaming.compiling import compilations
from lingbot_map.streaming.engine import StreamEngine


@dataclass(frozen=True)
class WarmUpReport:
    """Empty and zero before the first warm-up."""

    max_keyframes: int  # that the memory holds: fewer than asked for if memory is short
    seconds: float = 0.0
    size: tuple[int, int] | None = None  # of the network's input, width and height [px]
    compile_mode: str = ''  # what auto came to
    attention_backend: str = ''
    compilations: int | None = None  # of the process until then

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
        """How many graphs were compiled or captured since."""
        return 0 if self.compilations is None else compilations() - self.compilations

    def __str__(self) -> str:
        return (
            f'warmed up for {"x".join(map(str, self.size))} pixels in {self.seconds:.1f} s '
            f'(compile_mode {self.compile_mode}, attention_backend {self.attention_backend})'
        )
