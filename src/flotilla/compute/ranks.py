"""The ranks of a torchrun world, or the one rank of a plain process: reduce, agree, broadcast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process's place among all ranks; every method is a collective that all ranks must call together."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def join(cls, device_type: str) -> Ranks:
        """The world that torchrun describes in the environment (RANK, WORLD_SIZE, ...), else a world of one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        # gloo beside nccl, for the decisions that lie on the host; the time limit is longer than an evaluation.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=1))
        return cls(dist.get_rank(), dist.get_world_size())

    def sum_(self, x: Tensor) -> Tensor:
        """`x`, replaced by its sum over ranks."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def mean_(self, x: Tensor) -> Tensor:
        """`x`, replaced by its mean over ranks."""
        return self.sum_(x).div_(self.world_size) if self.world_size > 1 else x

    def broadcast_(self, x: Tensor) -> Tensor:
        """`x`, replaced by rank 0's."""
        if self.world_size > 1:
            dist.broadcast(x, src=0)
        return x

    def agree(self, flag: bool | Tensor) -> bool:
        """Whether the flag is set on any rank: a decision that all of them take alike."""
        if self.world_size == 1:
            return bool(flag)
        return bool(self.sum_(torch.as_tensor(flag, dtype=torch.float32)) > 0)

    def leave(self, *, together: bool) -> None:
        """Leave the world; `together` waits for the others, who must not lose a peer that is still at work."""
        if self.world_size > 1 and dist.is_initialized():
            if together:
                dist.barrier()
            dist.destroy_process_group()
