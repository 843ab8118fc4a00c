"""Adam behind one verb: zero, backward, all-reduce, clip, finite check, step, on one flat parameter.

Every parameter and its gradient is a view of two flat tensors, so that clipping, the reduction over ranks,
the finite check and Adam are one operation each, however many layers there are: for networks of a few
thousand weights this is most of the cost of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.compute.ranks import Ranks


class Optimizer:
    """Owns the gradients of `parameters`; after construction they and the gradients live in flat tensors.

    learning_rate: of Adam.  clip: largest global gradient norm, 0 for none.  eps: Adam's.
    A step whose gradient is not finite changes nothing, on all ranks, and is counted.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        clip: float,
        eps: float,
        ranks: Ranks,
    ) -> None:
        self._params = params = [p for p in parameters if p.requires_grad]
        self._ranks, self._clip = ranks, clip
        size = sum(p.numel() for p in params)
        flat = torch.empty(size, device=params[0].device)
        self._grad = torch.zeros_like(flat)
        self._grads: list[Tensor] = []  # views of _grad, one for each parameter
        offset = 0
        for p in params:
            # as_strided keeps each parameter's memory format: channels_last weights stay channels_last.
            view = flat.as_strided(p.shape, p.stride(), offset)
            view.copy_(p.data)
            p.data = view
            self._grads.append(self._grad.as_strided(p.shape, p.stride(), offset))
            offset += p.numel()
        ranks.broadcast_(flat)
        self._flat = nn.Parameter(flat)
        self._flat.grad = self._grad
        self._skipped = torch.zeros((), device=flat.device)
        self._adam = torch.optim.Adam([self._flat], lr=learning_rate, eps=eps, fused=True)

    def set_lr(self, learning_rate: float) -> None:
        self._adam.param_groups[0]["lr"] = learning_rate

    def step(self, loss: Tensor) -> dict[str, Tensor]:
        """One step down the gradient of a scalar loss; metrics stay on the device."""
        # One copy of all gradients costs less than zeroing them and adding to each.
        torch._foreach_copy_(self._grads, torch.autograd.grad(loss, self._params, materialize_grads=True))
        self._ranks.mean_(self._grad)
        norm = torch.linalg.vector_norm(self._grad)
        broken = (~torch.isfinite(norm)).float()
        if self._clip > 0:
            self._grad.mul_((self._clip / (norm + 1e-6)).clamp_(max=1.0))
        # Fused Adam leaves weights, moments and step count as they are where found_inf is 1.
        self._adam.found_inf = broken  # type: ignore[attr-defined]
        self._adam.step()
        self._skipped += broken
        return {"losses/grad_norm": norm, "losses/skipped_steps": self._skipped}

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's moments, flat, and its step count; the weights belong to the module."""
        return dict(self._adam.state[self._flat])

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._adam.state[self._flat] = {key: x.to(self._flat.device, copy=True) for key, x in state.items()}


def parameter_counts(module: nn.Module) -> dict[str, int]:
    """Number of trainable parameters of each direct child that has any, and of parameters held directly."""
    counts: dict[str, Any] = {
        name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()
    }
    counts |= {name: p.numel() for name, p in module.named_parameters(recurse=False)}
    return {name: n for name, n in counts.items() if n}
