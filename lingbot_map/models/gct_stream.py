"""GCTStream: the network that maps images to poses, depth and points (spec section 13)."""

from collections.abc import Mapping

from lingbot_map.aggregator.stream import AggregatorStream
from lingbot_map.heads.camera_head import block_causal, CameraHead
from lingbot_map.heads.dpt_head import DPTHead
from lingbot_map.layers.attention import attend_masked, init_linear
from lingbot_map.layers.vit import encoder_size, PatchEmbed, PatchEncoder
from lingbot_map.models.cuda import side_stream, tf32
from lingbot_map.models.memory import MemoryShape, StreamMemory
from lingbot_map.models.sequence_drivers import SequenceDrivers
from lingbot_map.models.windows import Outputs
import torch
from torch import nn, Tensor


class GCTStream(SequenceDrivers, nn.Module):
    """
    The streaming network. It holds the weights; a `StreamMemory` holds the state of a sequence.

    The stateful calls of the original (`forward`, `clean_kv_cache`, `_set_skip_append`) use
    `self.memory`; an engine passes its own memory to `stream`.
    """

    def __init__(
        self,
        img_size: int = 518,
        patch_size: int = 14,
        embed_dim: int = 1024,
        patch_embed: str = 'dinov2_vitl14_reg',
        pretrained_path: str = '',
        disable_global_rope: bool = False,
        enable_camera: bool = True,
        enable_depth: bool = True,
        enable_point: bool = False,
        enable_local_point: bool = False,
        enable_track: bool = False,
        enable_normalize: bool = False,
        pred_normalization: bool = False,
        sliding_window_size: int = -1,
        num_frame_for_scale: int = 1,
        num_random_frames: int = 0,
        attend_to_special_tokens: bool = False,
        attend_to_scale_frames: bool = False,
        enable_stream_inference: bool = True,
        enable_3d_rope: bool = False,
        max_frame_num: int = 1024,
        enable_camera_3d_rope: bool = False,
        camera_rope_theta: float = 10000.0,
        use_scale_token: bool = True,
        kv_cache_sliding_window: int = 64,
        kv_cache_scale_frames: int = 8,
        kv_cache_cross_frame_special: bool = True,
        kv_cache_include_scale_frames: bool = True,
        kv_cache_camera_only: bool = False,
        use_sdpa: bool = False,
        use_gradient_checkpoint: bool = True,
        camera_num_iterations: int = 4,
        *,
        depth: int = 24,
        num_heads: int = 16,
        selected_layers: tuple[int, ...] = (4, 11, 17, 23),
        mlp_ratio: float = 4.0,
        num_register_tokens: int = 4,
        vit_depth: int | None = None,
        vit_num_heads: int | None = None,
        vit_num_register_tokens: int = 4,
        camera_trunk_depth: int = 4,
        camera_num_heads: int = 16,
        dpt_features: int = 256,
        dpt_out_channels: tuple[int, ...] = (256, 512, 1024, 1024),
    ):
        """
        Build the network with random weights.

        The arguments before `*` are those of the original network. Arguments without effect on
        streaming are ignored.

        :raises ValueError: an argument asks for an unsupported feature.
        """
        super().__init__()
        _reject_unsupported(
            pretrained_path=pretrained_path,
            enable_track=enable_track,
            enable_normalize=enable_normalize,
            pred_normalization=pred_normalization,
            kv_cache_camera_only=kv_cache_camera_only,
            kv_cache_cross_frame_special=not kv_cache_cross_frame_special,
            kv_cache_include_scale_frames=not kv_cache_include_scale_frames,
        )
        if len(set(selected_layers)) != 4 or max(selected_layers) >= depth:
            raise ValueError(
                f'selected_layers is {tuple(selected_layers)}; the heads need four '
                f'different layers below depth {depth}'
            )
        self.patch_size = patch_size
        self.num_frame_for_scale = num_frame_for_scale
        self.max_frame_num = max_frame_num
        self.kv_cache_sliding_window = kv_cache_sliding_window
        self.kv_cache_scale_frames = kv_cache_scale_frames
        if 'conv' in patch_embed:
            encoder = PatchEmbed(patch_size, embed_dim)
        else:
            known_depth, known_heads = encoder_size(patch_embed)
            encoder = PatchEncoder(
                img_size,
                patch_size,
                embed_dim,
                vit_depth or known_depth,
                vit_num_heads or known_heads,
                vit_num_register_tokens,
                mlp_ratio,
            )
        rope = 'none' if disable_global_rope else '3d' if enable_3d_rope else '2d'
        self.aggregator = AggregatorStream(
            encoder,
            embed_dim,
            depth,
            num_heads,
            patch_size=patch_size,
            selected_layers=selected_layers,
            mlp_ratio=mlp_ratio,
            num_register_tokens=num_register_tokens,
            rope=rope,
        )
        width = 2 * embed_dim
        self.camera_head = (
            CameraHead(
                width,
                camera_trunk_depth,
                camera_num_heads,
                camera_num_iterations,
                mlp_ratio,
                camera_rope_theta if enable_camera_3d_rope else None,
            )
            if enable_camera
            else None
        )

        def dense(outputs: int) -> DPTHead:
            return DPTHead(width, dpt_features, tuple(dpt_out_channels), outputs, patch_size)

        self.depth_head = dense(2) if enable_depth else None
        self.point_head = dense(4) if enable_point else None
        self.local_point_head = dense(4) if enable_local_point else None
        self.apply(init_linear)
        self.heads_tf32 = False  # allow TF32 for the heads
        self.compile_mode, self.attention_backend = 'off', 'sdpa'  # see compiling.compile_model
        self.memory: StreamMemory | None = None
        self._skip_append = False
        self.eval()

    @classmethod
    def from_config(cls, config: Mapping) -> 'GCTStream':
        """
        Build the network from constructor arguments.

        :raises ValueError: unknown key.
        """
        try:
            return cls(**config)
        except TypeError as error:
            raise ValueError(f'model configuration: {error}') from error

    def memory_shape(self, patches: int, max_keyframes: int) -> MemoryShape:
        """Return the sizes of a StreamMemory for `patches` patch tokens per frame."""
        trunk, camera = self.aggregator, self.camera_head
        heads = trunk.global_blocks[0].attn.num_heads
        has_trunk = camera is not None and len(camera.trunk)
        return MemoryShape(
            layers=len(trunk.global_blocks),
            heads=heads,
            head_dim=trunk.head_dim,
            patches=patches,
            specials=trunk.patch_start_idx,
            anchors=self.kv_cache_scale_frames,
            window=self.kv_cache_sliding_window,
            max_keyframes=max_keyframes,
            camera_iterations=camera.iterations if has_trunk else 0,
            camera_depth=len(camera.trunk) if has_trunk else 0,
            camera_heads=camera.trunk[0].attn.num_heads if has_trunk else 0,
            camera_head_dim=camera.head_dim if has_trunk else 0,
        )

    def new_memory(self, height: int, width: int, max_keyframes: int) -> StreamMemory:
        """Allocate a StreamMemory for frames of `height` x `width` network pixels."""
        patches = (height // self.patch_size) * (width // self.patch_size)
        device = self.aggregator.camera_token.device
        return StreamMemory(
            self.memory_shape(patches, max_keyframes), device, self.aggregator.dtype
        )

    def stream(self, images: Tensor, memory: StreamMemory, num_frame_for_scale: int) -> Outputs:
        """Run frames (1, S, 3, H, W); call `memory.write` before, `commit` or `undo` after."""
        return self.predict(
            images, memory.index, num_frame_for_scale, memory.attend, memory.attend_camera
        )

    def predict(
        self, images: Tensor, index: Tensor, num_frame_for_scale: int, attend, attend_camera
    ) -> Outputs:
        """
        Run trunk and heads.

        `images` (B, S, 3, H, W) in [0, 1]; `index` (S,) number of frames kept before each frame;
        `attend` and `attend_camera` compute attention across frames (see AggregatorStream and
        CameraHead). Returns the outputs of `forward` without `images`.
        """
        with tf32(False):
            selected = self.aggregator(images, index, num_frame_for_scale, attend)
        # The heads get float32 inputs for any trunk precision (spec section 11).
        with torch.autocast(images.device.type, enabled=False), tf32(self.heads_tf32):
            poses: list[Tensor] = []
            with side_stream(images.device) as join:
                if self.camera_head is not None:
                    poses = self.camera_head(selected[-1][:, :, 0].float(), index, attend_camera)
            outputs = self.dense([layer.float() for layer in selected], images.shape[-2:])
            join()
        return outputs | ({'pose_enc': poses[-1], 'pose_enc_list': poses} if poses else {})

    def dense(self, selected: list[Tensor], size: tuple[int, int]) -> Outputs:
        """Run the depth and point heads on float32 trunk tokens, each (B, S, P, 2 dim)."""
        height, width = size
        patches = [layer[:, :, self.aggregator.patch_start_idx :] for layer in selected]
        outputs = {}
        if self.depth_head is not None:
            values, outputs['depth_conf'] = self.depth_head(patches, height, width)
            outputs['depth'] = values.exp()
        for head, name in (
            (self.point_head, 'world_points'),
            (self.local_point_head, 'cam_points'),
        ):
            if head is not None:
                values, outputs[f'{name}_conf'] = head(patches, height, width)
                outputs[name] = values.sign() * values.abs().expm1()
        return outputs

    def forward(
        self,
        images: Tensor,
        query_points=None,
        num_frame_for_scale: int | None = None,
        sliding_window_size=None,
        num_frame_per_block: int = 1,
        mask=None,
        causal_inference: bool = False,
        ordered_video=None,
        gather_outputs: bool = True,
        point_masks=None,
        **kwargs,
    ) -> Outputs:
        """
        Run frames (S, 3, H, W) or (1, S, 3, H, W) in [0, 1] over `self.memory`.

        To stream, call it with `causal_inference=True`: first the scale batch, then single frames.
        Without `causal_inference` the memory is cleared first, and the camera head attends in
        blocks of `num_frame_per_block` frames (spec section 9).

        :raises ValueError: wrong shape, batch larger than 1, several frames after the first call.
        """
        images = self._checked(images)
        if not causal_inference:
            self.clean_kv_cache()
        frames, (height, width) = images.shape[1], images.shape[-2:]
        memory = self._own_memory(height, width, frames, max(self.max_frame_num, frames))
        scale_frames = (
            self.num_frame_for_scale if num_frame_for_scale is None else num_frame_for_scale
        )
        memory.write(frames, keep=not self._skip_append)
        attend_camera = memory.attend_camera
        if not causal_inference:
            seen = block_causal(frames, num_frame_per_block, num_frame_for_scale or 0)
            seen = seen.to(images.device)

            def attend_camera(_iteration, _block, q, k, v):
                return attend_masked(q, k, v, seen)

        outputs = self.predict(images, memory.index, scale_frames, memory.attend, attend_camera)
        if self._skip_append:
            memory.undo()
        else:
            memory.commit()
        if not self.training:
            outputs['images'] = images
        return outputs

    def clean_kv_cache(self) -> None:
        """Clear `self.memory` and the skip-append mode."""
        self._skip_append = False
        if self.memory is not None:
            self.memory.reset()

    def _set_skip_append(self, skip: bool) -> None:
        """With `skip`, later single-frame calls are not kept in memory; without, they are."""
        self._skip_append = skip

    def get_kv_cache_info(self) -> dict[str, float]:
        """Return the number of trunk blocks with cached keys and the memory size [MiB]."""
        filled = self.memory is not None and self.memory.kept > 0
        return {
            'num_cached_blocks': self.memory.shape.layers if filled else 0,
            'cache_memory_mb': self.memory.nbytes / 2**20 if filled else 0.0,
        }

    def _checked(self, images: Tensor) -> Tensor:
        if images.dim() == 4:
            images = images[None]
        size = self.patch_size
        if images.dim() != 5 or images.shape[0] != 1 or images.shape[2] != 3:
            raise ValueError(
                f'images have shape {tuple(images.shape)}; streaming takes one sequence, '
                '(S, 3, H, W) or (1, S, 3, H, W)'
            )
        if images.shape[-2] % size or images.shape[-1] % size or 0 in images.shape:
            raise ValueError(
                f'image size {images.shape[-1]}x{images.shape[-2]} is not a positive '
                f'multiple of the patch size {size}; resize the images first'
            )
        return images

    def _own_memory(self, height: int, width: int, frames: int, capacity: int) -> StreamMemory:
        """Return `self.memory`; reallocate it for `capacity` frames if it does not fit."""
        patches = (height // self.patch_size) * (width // self.patch_size)
        memory, device = self.memory, self.aggregator.camera_token.device
        if memory is not None and memory.kept and memory.shape.patches != patches:
            raise ValueError(
                f'the image size changed to {width}x{height} within a sequence; '
                'call clean_kv_cache() first'
            )
        fits = memory is not None and (memory.device, memory.dtype, memory.shape) == (
            device,
            self.aggregator.dtype,
            self.memory_shape(patches, memory.shape.max_keyframes),
        )
        if not fits or (not memory.kept and memory.shape.max_keyframes < frames):
            memory = self.memory = None  # free the old buffers before allocating
            self.memory = self.new_memory(height, width, capacity)
        return self.memory


def _reject_unsupported(**requested: bool | str) -> None:
    for name, value in requested.items():
        if value:
            raise ValueError(
                f"GCTStream argument '{name}' is set to a value that is not supported; "
                'leave it at its default'
            )
