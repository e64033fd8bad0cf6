"""FrameRunner: runs the network over one memory, directly or by replaying CUDA graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
import threading

from lingbot_map.layers.attention import attend_fully
from lingbot_map.models.gct_stream import GCTStream
from lingbot_map.models.memory import StreamMemory
from lingbot_map.models.windows import Outputs
from lingbot_map.streaming import compiling
import torch
from torch import Tensor


class FrameRunner:
    """
    Runs frames in the model's `compile_mode`, between `memory.write` and `commit` or `undo`.

    The next run may overwrite the outputs; copy them to keep them. Use it from one thread only:
    torch keeps CUDA graphs per thread.
    """

    def __init__(self, model: GCTStream, memory: StreamMemory, scale_frames: int):
        self._model, self._memory, self._scale_frames = model, memory, scale_frames
        self.restart()

    def restart(self) -> None:
        """Drop all graphs and adopt the model's current compile mode and backend."""
        self._graphs: dict[object, CapturedPass] = {}
        self._thread: int | None = None  # the thread that warmed up; None before
        self._ring = None
        self._memory.attend_cached = attend_fully
        if self._model.attention_backend == 'flashinfer':
            from lingbot_map.streaming.cached_attention import (
                attend_prefill,  # an optional extra
            )

            self._memory.attend_cached = attend_prefill
        if self._model.attention_backend in compiling.RING_BACKENDS:
            from lingbot_map.streaming.cached_attention import RingAttention  # needs Triton

            self._ring = RingAttention(self._memory, self._model.attention_backend)

    def __call__(self, images: Tensor, scale_frames: int) -> Outputs:
        """
        Return the outputs of `GCTStream.predict` for uint8 images (S, 3, h, w).

        :raises RuntimeError: called from another thread than the warm-up.
        """
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                'a compiled engine was warmed up in another thread: load, warm up and push images '
                'in one thread'
            )
        graph = self._graphs.get(self._graph_key(len(images)))
        if graph is not None:
            return graph.replay(images)
        with self._stance():
            return self._forward(images, scale_frames)

    def capture(self, image: Tensor, pool: tuple | None) -> tuple | None:
        """
        Capture the scale batch and the pass of a later frame; return the graphs' memory pool.

        `image` (3, h, w) uint8. The memory must be empty; its contents are undefined afterwards.
        """
        count = self._scale_frames
        if count > 1:
            batch = image.repeat(count, 1, 1, 1)
            self._memory.write(count, keep=True)
            pool = self._capture(count, batch, lambda x: self._forward(x, count), pool)
            self._memory.undo()
        for fixed in self._ring.all_fixed():
            self._ring.prepare_capture(fixed)
            key = fixed.start, fixed.stop
            pool = self._capture(key, image[None], lambda x: self._forward(x, 1), pool)
        return pool

    def freeze(self) -> None:
        """Compile nothing from now on, and allow calls from this thread only."""
        if self._model.compile_mode != 'off':
            self._thread = threading.get_ident()

    def _capture(
        self, key: object, images: Tensor, run: Callable[[Tensor], Outputs], pool: tuple | None
    ) -> tuple:
        self._graphs[key] = captured = CapturedPass(run, images, pool)
        return captured.pool

    def _graph_key(self, frames: int) -> object:
        if frames > 1 or self._ring is None:
            return frames
        self._ring.update()
        return self._ring.fixed.start, self._ring.fixed.stop

    def _stance(self) -> AbstractContextManager:
        if self._thread is None:
            return nullcontext()
        return torch.compiler.set_stance('eager_on_recompile')

    def _forward(self, images: Tensor, scale_frames: int) -> Outputs:
        if compiling.uses_graph_trees(self._model):
            torch.compiler.cudagraph_mark_step_begin()
        images = images[None].float() / 255
        if images.shape[1] > 1 or self._ring is None:
            return self._model.stream(images, self._memory, scale_frames)
        ring = self._ring
        return self._model.predict(
            images, ring.index, scale_frames, ring.attend, ring.attend_camera
        )


class CapturedPass:
    """A CUDA graph with its input and outputs at fixed addresses."""

    def __init__(self, run: Callable[[Tensor], Outputs], images: Tensor, pool: tuple | None):
        self._images = images.clone()
        run(self._images)  # compile and let libraries plan their kernels before the capture
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            outputs = run(self._images)
        compiling.count_capture()
        self._outputs = {key: x for key, x in outputs.items() if isinstance(x, Tensor)}

    @property
    def pool(self) -> tuple:
        """Memory pool of the graph; graphs that never run at the same time can share it."""
        return self._graph.pool()

    def replay(self, images: Tensor) -> Outputs:
        """Run the graph on new images and return its outputs; the next replay overwrites them."""
        self._images.copy_(images)
        self._graph.replay()
        return self._outputs
