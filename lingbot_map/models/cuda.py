"""Control how the network runs on CUDA: TF32 precision, and work on parallel streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for float32 matrix products and convolutions in the body."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@contextmanager
def side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """
    During CUDA graph capture, run the body on a second stream; the yielded function joins it.

    Work issued between the body and the join runs in parallel. Tensors that the body reads must
    stay alive until the join. Outside a capture the body runs normally: the extra launches would
    cost more than they save.
    """
    if device.type != 'cuda' or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)
