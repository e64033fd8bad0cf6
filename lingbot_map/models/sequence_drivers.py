"""Run a GCTStream over a whole sequence, as one stream or in aligned windows."""

from lingbot_map.models.keyframes import Keyframes
from lingbot_map.models.windows import lay_out, Outputs, stitch, Window
import torch
from torch import Tensor

SCALE_FRAME, KEYFRAME, NON_KEYFRAME = range(3)  # values of `frame_type`


class SequenceDrivers:
    """Mixin of GCTStream with the loops over the frames of a sequence."""

    @torch.no_grad()
    def inference_streaming(
        self,
        images: Tensor,
        num_scale_frames: int | None = None,
        keyframe_interval: int = 1,
        output_device=None,
        flow_threshold: float = 0.0,
        max_non_keyframe_gap: int = 30,
    ) -> Outputs:
        """
        Run a whole sequence (S, 3, H, W) or (1, S, 3, H, W), on any device, frame by frame.

        `keyframe_interval`, `flow_threshold` [px] and `max_non_keyframe_gap` select keyframes as
        in `Keyframes`. Returns `pose_enc`, dense outputs and `images`, concatenated along S. With
        a flow threshold, also `flow` (1, N) [px] of the frames after the scale batch.

        With `output_device`, outputs are moved there after each frame, and the memory is released
        at the end.
        """
        images = self._checked(images)
        frames = images.shape[1]
        scale_frames = min(num_scale_frames or self.num_frame_for_scale, frames)
        keyframes = Keyframes(keyframe_interval, flow_threshold, max_non_keyframe_gap)
        self._reserve(images, frames)
        run = _Run(self, images, scale_frames, keyframes, output_device)
        outputs = run.window(range(frames), frames).outputs
        del outputs['frame_type'], outputs['is_keyframe']
        return run.finish(outputs)

    @torch.no_grad()
    def inference_windowed(
        self,
        images: Tensor,
        window_size: int = 16,
        overlap_size: int | None = None,
        overlap_keyframes: int | None = None,
        num_scale_frames: int | None = None,
        scale_mode: str = 'median',
        output_device=None,
        keyframe_interval: int = 1,
        flow_threshold: float = 0.0,
        max_non_keyframe_gap: int = 30,
    ) -> Outputs:
        """
        Run a whole sequence in overlapping windows of `window_size` kept frames each.

        Arguments and results are those of `inference_streaming`, plus the results `frame_type`
        (0 scale frame, 1 keyframe, 2 neither), `is_keyframe` and `alignment_mode`. See `lay_out`
        for the overlap, and `stitch` for the alignment and the results it adds. With a flow
        threshold a window ends at its last keyframe, and `flow` contains the frames of an overlap
        twice. `scale_mode` must be 'median'.

        :raises ValueError: an overlap as long as a window, or a model without camera head.
        """
        if scale_mode != 'median':
            raise ValueError(f"scale_mode is '{scale_mode}'; only 'median' is supported")
        if self.camera_head is None:
            raise ValueError('windows are aligned by their poses: enable_camera must be True')
        images = self._checked(images)
        frames = images.shape[1]
        layout = lay_out(
            frames, num_scale_frames or self.num_frame_for_scale, window_size, overlap_size,
            overlap_keyframes, keyframe_interval)  # fmt: skip
        keyframes = Keyframes(keyframe_interval, flow_threshold, max_non_keyframe_gap)
        most_kept = min(max(window_size, layout.scale_frames), frames)
        self._reserve(images, most_kept)
        run = _Run(self, images, layout.scale_frames, keyframes, output_device)
        if keyframes.by_flow:
            windows = run.flow_windows(layout.overlap, most_kept)
        else:
            windows = [run.window(window, most_kept) for window in layout.windows(frames)]
        return {**run.finish(stitch(windows)), 'alignment_mode': 'scaled'}

    def _reserve(self, images: Tensor, most_kept: int) -> None:
        self.clean_kv_cache()
        self._own_memory(*images.shape[-2:], most_kept, most_kept)


class _Run:
    """One pass over a sequence; each window starts with an empty memory."""

    def __init__(
        self, model, images: Tensor, scale_frames: int, keyframes: Keyframes, output_device
    ):
        self._model, self._images, self._scale_frames = model, images, scale_frames
        self._keyframes = keyframes
        self._device = model.aggregator.camera_token.device
        self._output_device = output_device
        self._flow: list[float] = []

    def window(self, frames: range, most_kept: int) -> Window:
        """Run `frames`; with a flow threshold stop when `most_kept` frames are kept."""
        memory = self._model.memory
        memory.reset()
        scale_end = min(frames.start + self._scale_frames, frames.stop)
        steps = [self._scale_batch(frames.start, scale_end)]
        types = [SCALE_FRAME] * (scale_end - frames.start)
        for frame in range(scale_end, frames.stop):
            if self._keyframes.by_flow and memory.kept >= most_kept:
                break
            outputs, kept = self._frame(frame)
            steps.append(outputs)
            types.append(KEYFRAME if kept else NON_KEYFRAME)
        outputs = {key: torch.cat([step[key] for step in steps], 1) for key in steps[0]}
        device = self._output_device or self._device
        outputs['frame_type'] = torch.tensor([types], dtype=torch.uint8, device=device)
        outputs['is_keyframe'] = outputs['frame_type'] != NON_KEYFRAME
        return Window(frames.start, outputs)

    def flow_windows(self, overlap: int, most_kept: int) -> list[Window]:
        """Run windows whose ends depend on the flow: each ends at its last keyframe."""
        total = self._images.shape[1]
        windows = [self.window(range(total), most_kept)]
        while windows[-1].stop < total:
            start = max(windows[-1].stop - overlap, windows[-1].start + self._scale_frames)
            windows.append(self.window(range(start, total), most_kept))
        return windows

    def finish(self, outputs: Outputs) -> Outputs:
        """Add `flow` and `images` to the outputs; release the memory with `output_device`."""
        if self._output_device is not None:
            self._model.memory = None
        device = self._output_device or self._device
        if self._keyframes.by_flow:
            outputs['flow'] = torch.tensor([self._flow], device=device)
        outputs['images'] = self._images.to(self._output_device or self._images.device)
        return outputs

    def _scale_batch(self, start: int, end: int) -> Outputs:
        memory = self._model.memory
        memory.write(end - start, keep=True)
        outputs = self._forward(start, end)
        memory.commit()
        poses = outputs.get('pose_enc')
        self._keyframes.start(None if poses is None else poses[0, -1])
        return self._moved(outputs)

    def _frame(self, frame: int) -> tuple[Outputs, bool]:
        memory = self._model.memory
        memory.write(1, self._keyframes.keeps_early())
        outputs = self._forward(frame, frame + 1)
        kept = self._keyframes.keeps(outputs)
        if kept:
            memory.commit()
        else:
            memory.undo()
        self._keyframes.advance(kept, outputs)
        if self._keyframes.by_flow and 'depth' in outputs:
            self._flow.append(self._keyframes.flow)
        return self._moved(outputs), kept

    def _forward(self, start: int, end: int) -> Outputs:
        images = self._images[:, start:end].to(self._device)
        return self._model.stream(images, self._model.memory, self._scale_frames)

    def _moved(self, outputs: Outputs) -> Outputs:
        device = self._output_device or self._device
        return {k: v.to(device) for k, v in outputs.items() if k != 'pose_enc_list'}
