"""Adam behind one verb: loss, gradients, all-reduce, clip, finite check, step, on one flat parameter.

Every parameter and its gradient is a view of two flat tensors, so that clipping, the reduction over ranks,
the finite check and Adam are one operation each, however many layers there are: for networks of a few
thousand weights this is most of the cost of a step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.compute.compile import Compile, choose_threads, compiled
from flotilla.compute.precision import LossScale, Precision
from flotilla.compute.ranks import Ranks
from flotilla.core.types import tree_map

# Any arguments, of which dicts are batches -> a mean over the samples, and named terms without gradient.
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

BETAS = (0.9, 0.999)


class Optimizer:
    """Owns the gradients of `parameters`; after construction they and the gradients live in flat tensors.

    learning_rate: of Adam.  clip: largest global gradient norm, 0 for none.  eps: Adam's.  compile: whether
    losses and their gradients are compiled, together: one graph has half the cost of a compiled loss alone.
    precision: fp16 scales losses, so that small gradients do not vanish.  grad_accum_steps: in so many parts a
    batch goes through the network.  most_threads: the first step finds out whether one or so many threads are
    faster, for the whole process; 0 leaves them as they are.  fused: one kernel for the step, else one operation after
    another.
    A step whose gradient is not finite changes nothing, on all ranks, and is counted; it `is_stuck`
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
        precision: Precision = "fp32",
        grad_accum_steps: int = 1,
        fused: bool = True,
        most_threads: int = 0,
        max_skipped: int = 10,
    ) -> None:
        self._params = params = [p for p in parameters if p.requires_grad]
        self._ranks, self._clip, self._parts, self._fused = ranks, clip, grad_accum_steps, fused
        self._half = precision != "fp32"
        self._gradients = compiled(gradients, compile, params[0].device)
        size = sum(p.numel() for p in params)
        flat = torch.empty(size, device=params[0].device, dtype=params[0].dtype)
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
        self._scale = LossScale(flat.device) if precision == "fp16" else None
        self._most_threads, self._max_skipped = most_threads, max_skipped
        self._terms: dict[str, Tensor] = {}

    def set_lr(self, learning_rate: float) -> None:
        self._lr = learning_rate

    def step(self, loss: Loss, *args: Any) -> dict[str, Tensor]:
        """One step down the gradient of `loss(*args)`: its terms, and what the step says; all stay on the device."""
        terms = self._differentiate(loss, args)
        self._ranks.mean_(self._grad)
        norm = torch.linalg.vector_norm(self._grad)
        broken = (norm - norm).ne_(0)  # 1 where the norm is not finite, else 0
        self._steps += 1 - broken
        self._skipped += broken
        self._in_a_row.add_(1.0).mul_(broken)
        divisor = None
        if self._scale is not None:
            divisor = self._scale.value.clone()
            norm = norm / divisor
            self._scale.update(broken)
        if self._clip > 0:
            excess = ((norm + 1e-6) / self._clip).clamp_(min=1.0)
            divisor = excess if divisor is None else excess * divisor
        self._adam(divisor, broken)
        if self._half:
            torch.clear_autocast_cache()  # of the weights as they were
        self._terms = terms
        return terms | {"grad_norm": norm, "skipped_steps": self._skipped}

    def _differentiate(self, loss: Loss, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """The gradient of `loss(*args)`, times the loss scale, into its place; the loss's terms."""
        scale = None if self._scale is None else self._scale.value
        if self._most_threads:
            part = next(parts(args, self._parts))[1] if self._parts > 1 else args
            choose_threads(functools.partial(self._gradients, loss, part, self._params, scale), self._most_threads)
            self._most_threads = 0
        if self._parts == 1:
            grads, terms = self._gradients(loss, args, self._params, scale)
            # One copy of all gradients costs less than zeroing them and adding to each.
            torch._foreach_copy_(self._grads, grads)
            return terms
        self._grad.zero_()
        found = []
        for share, part in parts(args, self._parts):
            grads, terms = self._gradients(loss, part, self._params, scale)
            torch._foreach_add_(self._grads, grads, alpha=share)
            found.append((share, {name: x.clone() for name, x in terms.items()}))
        return joined(found)

    def _adam(self, divisor: Tensor | None, broken: Tensor) -> None:
        """The step of Kingma & Ba 2015 down the gradient over `divisor`, where it is not broken."""
        beta1, beta2 = BETAS
        if self._fused:
            # The kernel under torch.optim.Adam(fused=True), whose Python costs more than all the rest here.
            torch._fused_adam_(
                [self._flat],
                [self._grad],
                [self._mean],
                [self._square],
                [],
                [self._steps],
                lr=self._lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None if divisor is None else divisor.to(torch.float32),
                found_inf=broken.to(torch.float32),
            )
            return
        grad = self._grad if divisor is None else self._grad / divisor
        grad = torch.where(broken.bool(), 0.0, grad)
        keep = 1 - broken  # a weight of 0 leaves the moments as they are
        self._mean.lerp_(grad, (1 - beta1) * keep)
        self._square.lerp_(grad.square(), (1 - beta2) * keep)
        deviation = (self._square / (1 - beta2**self._steps)).sqrt_().add_(self._eps)
        change = self._mean / deviation * (self._lr / (1 - beta1**self._steps))
        self._flat.sub_(torch.where(broken.bool(), 0.0, change))

    def is_stuck(self) -> bool:
        """Whether too many steps in a row had a gradient that is not finite."""
        return bool(self._in_a_row > self._max_skipped)

    def problem(self, names: Mapping[str, nn.Parameter]) -> str:
        """Which terms of the last loss, or else which parameters' gradients, are not finite, in words."""
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
        """Adam's moments, flat, its step count and the loss scale; the weights belong to the module."""
        state = {"step": self._steps, "exp_avg": self._mean, "exp_avg_sq": self._square}
        return state | ({} if self._scale is None else self._scale.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, x in self.state_dict().items():
            if name in state:  # a loss scale is not there where the precision was another one
                x.copy_(state[name])


def gradients(
    loss: Loss, args: tuple[Any, ...], parameters: Sequence[Tensor], scale: Tensor | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The gradient of `loss(*args)` by each parameter (zero where it has no part in it), and the loss's terms."""
    total, terms = loss(*args)
    total = total if scale is None else total * scale
    return torch.autograd.grad(total, parameters, materialize_grads=True), terms


def parts(args: tuple[Any, ...], count: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """The arguments with only a part of each batch (of each dict), and its share of the samples."""
    sizes: list[int] = []
    tree_map(lambda x: sizes.append(len(x)), next(x for x in args if isinstance(x, dict)))
    size = sizes[0]
    bounds = [size * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            part = tuple(
                tree_map(lambda x: x[start:stop], arg) if isinstance(arg, dict) else arg  # noqa: B023
                for arg in args
            )
            yield (stop - start) / size, part


def joined(found: Sequence[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The terms of a whole batch: means of those that are means, all of those that have a value for each sample."""
    terms = {}
    for name, x in found[0][1].items():
        if x.dim():
            terms[name] = torch.cat([part[name] for _, part in found])
        else:
            terms[name] = torch.stack([part[name] * share for share, part in found]).sum()
    return terms


def parameter_counts(module: nn.Module) -> dict[str, int]:
    """Number of trainable parameters of each direct child that has any, and of parameters held directly."""
    counts: dict[str, Any] = {
        name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()
    }
    counts |= {name: p.numel() for name, p in module.named_parameters(recurse=False)}
    return {name: n for name, n in counts.items() if n}
