"""The ranks of a torchrun world, or the one rank of a plain process: reduce, gather, share."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PeerLost(RuntimeError):
    """Another rank died, or did not answer in time."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among all ranks; every method is a collective that all ranks must call together."""

    rank: int = 0
    world_size: int = 1
    _spent_s: list[float] = field(default_factory=lambda: [0.0], compare=False, repr=False)

    @property
    def seconds(self) -> float:
        """Spent in collectives so far, in waiting for other ranks as in sending."""
        return self._spent_s[0]

    @classmethod
    def join(cls, device_type: str, timeout_s: float = 1800.0) -> Ranks:
        """The world that torchrun describes in the environment (RANK, WORLD_SIZE, ...), else a world of one.

        `timeout_s` is how long this waits for the others, and how long each collective will.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return cls()
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size) and sys.platform == "linux":
            # All ranks are on this machine, whose own name need not lead to a usable address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # gloo beside nccl, for the decisions that lie on the host.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        ranks = cls(int(os.environ["RANK"]), world_size)
        ranks._together(dist.init_process_group, backend, timeout=timedelta(seconds=timeout_s))
        return ranks

    def sum_(self, x: Tensor) -> Tensor:
        """`x`, replaced by its sum over ranks."""
        if self.world_size > 1:
            self._together(dist.all_reduce, x)
        return x

    def mean_(self, x: Tensor) -> Tensor:
        """`x`, replaced by its mean over ranks."""
        return self.sum_(x).div_(self.world_size) if self.world_size > 1 else x

    def max_(self, x: Tensor) -> Tensor:
        """`x`, replaced by its largest over ranks."""
        if self.world_size > 1:
            self._together(dist.all_reduce, x, dist.ReduceOp.MAX)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The rows (k, ...) of all ranks in their order; k may differ between ranks, the rest may not."""
        if self.world_size == 1:
            return x
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(x)
        self.sum_(counts)
        most = int(counts.max())
        own = x.new_zeros(most, *x.shape[1:])
        own[: len(x)] = x
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        if own.numel():
            # As bytes, since gloo does not know every dtype.
            self._together(dist.all_gather, [part.view(torch.uint8) for part in parts], own.view(torch.uint8))
        return torch.cat([part[:n] for part, n in zip(parts, counts.tolist(), strict=True)])

    def share(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's tensors, on the host, on every rank; the others pass None."""
        if self.world_size == 1:
            assert tensors is not None
            return dict(tensors)
        named = [(name, str(x.dtype)[6:], list(x.shape)) for name, x in (tensors or {}).items()]
        words = torch.frombuffer(bytearray(json.dumps(named).encode()), dtype=torch.uint8)
        length = self.broadcast_(torch.tensor(len(words)))
        text = words if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        self.broadcast_(text)
        shared = {}
        for name, dtype, shape in json.loads(text.numpy().tobytes()):
            x = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensors is not None:
                x.copy_(tensors[name])
            if x.numel():
                self.broadcast_(x.reshape(-1).view(torch.uint8))
            shared[name] = x
        return shared

    def broadcast_(self, x: Tensor) -> Tensor:
        """`x`, replaced by rank 0's."""
        if self.world_size > 1:
            self._together(dist.broadcast, x, src=0)
        return x

    def leave(self, *, together: bool) -> None:
        """Leave the world; `together` waits for the others, who must not lose a peer that is still at work."""
        if self.world_size > 1 and dist.is_initialized():
            if together:
                self._together(dist.barrier)
            dist.destroy_process_group()

    def _together(self, collective: Callable[..., Any], *args: Any, **settings: Any) -> None:
        """Call a collective; PeerLost where another rank died or did not come in time."""
        start = time.perf_counter()
        try:
            collective(*args, **settings)
            self._spent_s[0] += time.perf_counter() - start
        except RuntimeError as error:
            reason = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).strip()).partition(". ")[0]
            raise PeerLost(
                f"rank {self.rank} of {self.world_size} lost another rank ({reason}); "
                "start the same command again, and it goes on from the last checkpoint"
            ) from error
