"""Optimisers for training from random weights: Muon for matrices, Adam for the rest."""

import torch
from torch import nn, Tensor

# Coefficients of the quintic Newton-Schulz iteration that drives singular values towards 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
ADAM_SHARE = 0.075  # learning rate of Adam relative to that of Muon


class Muon(torch.optim.Optimizer):
    """
    Momentum with orthogonalised updates, computed on stacks of matrices of equal shape.

    A fused qkv projection is treated as three matrices.
    """

    def __init__(
        self, matrices: list[tuple[str, nn.Parameter]], lr: float, weight_decay: float = 0.01
    ):
        groups: dict[tuple, list[nn.Parameter]] = {}
        for name, parameter in matrices:
            parts = 3 if name.endswith('qkv.weight') else 1
            groups.setdefault((parts, *parameter.shape), []).append(parameter)
        super().__init__(
            [{'params': members, 'parts': key[0]} for key, members in groups.items()],
            {'lr': lr, 'weight_decay': weight_decay},
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update all matrices."""
        for group in self.param_groups:
            parameters = group['params']
            shape = parameters[0].shape
            gradient = torch.stack([p.grad for p in parameters])
            gradient = gradient.view(-1, shape[0] // group['parts'], *shape[1:])
            state = self.state[parameters[0]]
            if 'momentum' not in state:
                state['momentum'] = torch.zeros_like(gradient)
            momentum = state['momentum'].lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, MOMENTUM))
            stretch = max(1, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group['lr'] * group['weight_decay'])
            updates = (update * (-group['lr'] * stretch)).view(len(parameters), *shape)
            torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (N, rows, cols) with the same singular vectors, singular values near 1."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


def make_optimisers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of blocks and camera head, Adam for other parameters."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inside = parameter.dim() == 2 and ('blocks.' in name or 'camera_head.' in name)
        if inside and min(parameter.shape) >= 32:
            matrices.append((name, parameter))
        else:
            others.append(parameter)
    adam = torch.optim.AdamW(
        others, ADAM_SHARE * lr, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda
    )
    return [Muon(matrices, lr), adam]
