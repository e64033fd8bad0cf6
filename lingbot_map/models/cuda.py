"""How the network runs on CUDA: precision of float32 products, streams beside each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Run products and convolutions of float32 tensors as TF32, or exactly, whatever is set."""
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
    Let a captured graph run the body beside what follows, until the yielded function is called.

    Elsewhere, where launches cost more than is won, the body just runs. What the body reads must
    stay alive until then.
    """
    if device.type != 'cuda' or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)
