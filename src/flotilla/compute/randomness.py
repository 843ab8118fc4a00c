"""The global random generators of this process (Python, NumPy, torch on CPU and GPU): seeded, saved, restored."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from flotilla.core.seeding import stream_seed


class Randomness:
    """This rank's generators.  Keys of the state end in `_R`: dimension 0 is the rank."""

    def __init__(self, device: torch.device, seed: int, rank: int) -> None:
        self._device, self._seed, self._rank = device, seed, rank
        self.reseed()

    def reseed(self, purpose: str = "") -> None:
        """Streams of this rank's own, other ones for each purpose."""
        random.seed(stream_seed(self._seed, f"python{purpose}", self._rank))
        np.random.seed(stream_seed(self._seed, f"numpy{purpose}", self._rank))  # noqa: NPY002  users' code may draw from it
        torch.manual_seed(stream_seed(self._seed, f"torch{purpose}", self._rank))

    def state_dict(self) -> dict[str, Tensor]:
        version, words, gauss = random.getstate()
        assert version == 3
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002
        assert isinstance(numpy, dict)
        state = {
            "python_R": torch.tensor([words], dtype=torch.int64),
            "numpy_R": torch.tensor([[*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"]]]),
            # Of the pair of normal draws that both make at once, the one that waits; NaN where none does.
            "gauss_R": torch.tensor([[np.nan if gauss is None else gauss, numpy["gauss"]]], dtype=torch.float64),
            "torch_R": torch.get_rng_state()[None],
        }
        if self._device.type == "cuda":
            state["cuda_R"] = torch.cuda.get_rng_state(self._device)[None]
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of one rank; a GPU's is left alone where there was none or is none now."""
        gauss, of_numpy = state["gauss_R"][0].tolist()
        random.setstate((3, tuple(state["python_R"][0].tolist()), None if np.isnan(gauss) else gauss))
        *key, position, has_gauss = state["numpy_R"][0].tolist()
        np.random.set_state(  # noqa: NPY002
            {
                "bit_generator": "MT19937",
                "state": {"key": np.array(key, np.uint32), "pos": position},
                "has_gauss": has_gauss,
                "gauss": of_numpy,
            }
        )
        torch.set_rng_state(state["torch_R"][0].clone())  # torch 2.13 crashes on a view into a larger tensor
        if self._device.type == "cuda" and "cuda_R" in state:
            torch.cuda.set_rng_state(state["cuda_R"][0].clone(), self._device)
