"""What ranks say to each other: every dtype and shape, the same on all of them, and nothing in a world of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla.compute.ranks import Ranks
from flotilla.launch import launch

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs torch with gloo"
    ),
    pytest.mark.usefixtures("no_hang"),
]
DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def in_world(size: int, function: str, folder: Path) -> list[Any]:
    """What a function of this module says on each rank, as JSON."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, os, test_collectives\n"
        "from flotilla.compute.ranks import Ranks\n"
        "ranks = Ranks.join('cpu', 60.0)\n"
        f"said = test_collectives.{function}(ranks)\n"
        "ranks.leave(together=True)\n"
        f"open({str(folder)!r} + '/rank' + os.environ['RANK'], 'w').write(json.dumps(said))"
    )
    assert launch(size, [sys.executable, "-c", program]) == 0
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]


def own(rank: int, *shape: int, dtype: str = "float32") -> Tensor:
    """Numbers that differ between ranks and between places; exact in every dtype."""
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) + 7 * rank) % 50).reshape(shape).to(getattr(torch, dtype))


def reductions(ranks: Ranks) -> list[Any]:
    x = own(ranks.rank, 2, 3)
    in_place = ranks.sum_(x)
    assert in_place is x
    found = [
        x,
        ranks.mean_(own(ranks.rank, 2, 3)),
        ranks.max_(own(-ranks.rank, 4)),
        ranks.broadcast_(own(ranks.rank, 3)),
    ]
    assert ranks.seconds > 0
    return [x.tolist() for x in found]


@pytest.mark.parametrize("size", [2, 3])
def test_reductions(tmp_path: Path, size: int) -> None:
    of_each = torch.stack([own(rank, 2, 3) for rank in range(size)])
    largest = torch.stack([own(-rank, 4) for rank in range(size)]).amax(0)
    expected = [of_each.sum(0).tolist(), of_each.mean(0).tolist(), largest.tolist(), own(0, 3).tolist()]
    assert in_world(size, "reductions", tmp_path) == [expected] * size


def rows(rank: int) -> list[Tensor]:
    """As many rows as the rank has; rank 0 has none."""
    many = [own(rank, rank, *rest, dtype=dtype) for dtype in DTYPES for rest in ((), (3,), (2, 1, 3), (0,))]
    return [*many, own(rank, 0, 2), own(rank, 6, 2)[::2], own(rank, 3, 2).T]


def gathered(ranks: Ranks) -> list[Any]:
    found = [ranks.gather(x) for x in rows(ranks.rank)]
    return [[str(x.dtype), list(x.shape), x.tolist()] for x in found]


def test_gather_keeps_the_order_of_ranks_whatever_the_rows_are(tmp_path: Path) -> None:
    joined = [torch.cat(parts) for parts in zip(*[rows(rank) for rank in range(3)], strict=True)]
    expected = [[str(x.dtype), list(x.shape), x.tolist()] for x in joined]
    assert in_world(3, "gathered", tmp_path) == [expected] * 3


def tensors() -> dict[str, Tensor]:
    named = {f"a.{dtype}": own(1, 2, 3, dtype=dtype) for dtype in DTYPES}
    return named | {
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "ä b": torch.tensor([torch.nan]),
        "t": own(0, 2, 3).T,
    }


def shared(ranks: Ranks) -> list[Any]:
    found = ranks.share(tensors() if ranks.rank == 0 else None)
    assert ranks.share({} if ranks.rank == 0 else None) == {}
    return [[name, str(x.dtype), list(x.shape), str(x.tolist())] for name, x in found.items()]


def test_share_hands_on_what_rank_0_has(tmp_path: Path) -> None:
    expected = [[name, str(x.dtype), list(x.shape), str(x.tolist())] for name, x in tensors().items()]
    assert in_world(2, "shared", tmp_path) == [expected] * 2


def test_a_world_of_one_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.join("cpu")
    x, before = own(0, 2, 3), own(0, 2, 3)
    for verb in (ranks.sum_, ranks.mean_, ranks.max_, ranks.broadcast_, ranks.gather):
        assert torch.equal(verb(x), before)
    assert torch.equal(ranks.share({"x": x})["x"], before)
    ranks.leave(together=True)
    assert (ranks.rank, ranks.world_size, ranks.seconds) == (0, 1, 0.0)
    assert not torch.distributed.is_initialized()
