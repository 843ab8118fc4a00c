"""Adam behind one verb: loss, gradients, all-reduce, clip, finite check, step, on one flat parameter.

Every parameter and its gradient is a view of two flat tensors, so that clipping, the reduction over ranks,
the finite check and Adam are one operation each, however many layers there are: for networks of a few
thousand weights this is most of the cost of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.compute.compile import Compile, compiled
from flotilla.compute.ranks import Ranks

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # any arguments -> a scalar, and named terms without gradient


class Optimizer:
    """Owns the gradients of `parameters`; after construction they and the gradients live in flat tensors.

    learning_rate: of Adam.  clip: largest global gradient norm, 0 for none.  eps: Adam's.  compile: whether
    losses and their gradients are compiled, together: one graph has half the cost of a compiled loss alone.
    A step whose gradient is not finite changes nothing, on all ranks, and is counted; `problem` says what is wrong
    when more than `max_skipped` follow each other.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        clip: float,
        eps: float,
        ranks: Ranks,
        compile: Compile = "none",
        max_skipped: int = 10,
    ) -> None:
        self._params = params = [p for p in parameters if p.requires_grad]
        self._ranks, self._clip = ranks, clip
        self._gradients = compiled(gradients, compile)
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
        self._flat, self._lr, self._eps = flat, learning_rate, eps
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._steps, self._skipped, self._in_a_row = (torch.zeros((), device=flat.device) for _ in range(3))
        self._max_skipped = max_skipped
        self._terms: dict[str, Tensor] = {}

    def set_lr(self, learning_rate: float) -> None:
        self._lr = learning_rate

    def step(self, loss: Loss, *args: Any) -> dict[str, Tensor]:
        """One step down the gradient of `loss(*args)`: its terms, and what the step says; all stay on the device."""
        grads, terms = self._gradients(loss, args, self._params)
        # One copy of all gradients costs less than zeroing them and adding to each.
        torch._foreach_copy_(self._grads, grads)
        self._ranks.mean_(self._grad)
        norm = torch.linalg.vector_norm(self._grad)
        broken = (norm - norm).ne_(0)  # 1 where the norm is not finite, else 0
        self._steps += 1 - broken
        self._skipped += broken
        self._in_a_row.add_(1.0).mul_(broken)
        self._terms = terms
        # The kernel under torch.optim.Adam(fused=True), whose Python costs more than all the rest here.  It divides
        # by grad_scale, which clips, and does nothing where found_inf is 1.
        torch._fused_adam_(
            [self._flat],
            [self._grad],
            [self._mean],
            [self._square],
            [],
            [self._steps],
            lr=self._lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=((norm + 1e-6) / self._clip).clamp_(min=1.0) if self._clip > 0 else None,
            found_inf=broken,
        )
        return terms | {"grad_norm": norm, "skipped_steps": self._skipped}

    def problem(self, names: Mapping[str, nn.Parameter]) -> str:
        """Which terms of the loss, or else which parameters' gradients, are not finite, after too many such steps."""
        if self._in_a_row <= self._max_skipped:
            return ""
        broken = [name for name, x in self._terms.items() if not bool(torch.isfinite(x).all())]
        if not broken:
            grads = {id(p): grad for p, grad in zip(self._params, self._grads, strict=True)}
            broken = [
                f"the gradient of {name}"
                for name, p in names.items()
                if id(p) in grads and not bool(torch.isfinite(grads[id(p)]).all())
            ]
        return f"{' and '.join(broken)} not finite in {int(self._in_a_row)} optimizer steps in a row"

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's moments, flat, and its step count; the weights belong to the module."""
        return {"step": self._steps, "exp_avg": self._mean, "exp_avg_sq": self._square}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, x in self.state_dict().items():
            x.copy_(state[name])


def gradients(
    loss: Loss, args: tuple[Any, ...], parameters: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The gradient of `loss(*args)` by each parameter (zero where it has no part in it), and the loss's terms."""
    total, terms = loss(*args)
    return torch.autograd.grad(total, parameters, materialize_grads=True), terms


def parameter_counts(module: nn.Module) -> dict[str, int]:
    """Number of trainable parameters of each direct child that has any, and of parameters held directly."""
    counts: dict[str, Any] = {
        name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()
    }
    counts |= {name: p.numel() for name, p in module.named_parameters(recurse=False)}
    return {name: n for name, n in counts.items() if n}
