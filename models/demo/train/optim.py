"""Muon for the layers' matrices: momentum, orthogonalised by five Newton-Schulz steps (Jordan et al., 2024)."""

import torch


def orthogonalise(m):
    """Pushes the singular values of each matrix in a stack [n, rows <= columns, columns] towards one."""
    x = m.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in 5 * [(3.4445, -4.7750, 2.0315)]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are updated as one stack. The step is scaled to AdamW's usual size."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.01):
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(sorted(p.shape)), []).append(p)
        groups = [{"params": group} for group in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            wide = [p if p.shape[0] <= p.shape[1] else p.mT for p in group["params"]]
            grad = torch.stack([p.grad if p.shape[0] <= p.shape[1] else p.grad.mT for p in group["params"]])
            buffer = group.setdefault("buffer", torch.zeros_like(grad))
            buffer.lerp_(grad, 1 - group["momentum"])
            update = orthogonalise(grad.lerp(buffer, group["momentum"])).float()
            scale = 0.2 * max(grad.shape[-2:]) ** 0.5
            torch._foreach_mul_(wide, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(wide, list(update.unbind()), alpha=-group["lr"] * scale)
