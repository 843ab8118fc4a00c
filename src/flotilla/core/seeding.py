"""Every random stream has an address: (seed, purpose, index); equal addresses give equal streams everywhere."""

from __future__ import annotations

import zlib

import numpy as np


def stream_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A 31-bit seed for one stream.

    `index` is the global environment index or the rank, so that a trajectory does not depend on how
    environments are split over workers or ranks.  31 bits, because ALE and EnvPool take a C int.
    """
    address = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), index])
    return int(address.generate_state(1, np.uint32)[0] >> 1)


def episode_seed(seed: int, episode: int) -> int:
    """A 31-bit seed for each episode of an environment, the first of which has the environment's own.

    A few integer operations (the finaliser of MurmurHash3), as short episodes would notice what `stream_seed` costs.
    """
    if episode == 0:
        return seed
    x = (seed + 0x9E3779B9 * episode) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return (x ^ x >> 16) >> 1
