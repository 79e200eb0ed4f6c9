"""Random numbers that depend on (seed, position) alone: counter-based, no state, the same on every rank and device.

Numpy only, so that the simulated device can use it too.
"""

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)

UInts = npt.NDArray[np.uint64]


def _mix(x: UInts) -> UInts:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64 bits that mixes them well."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


def hash64(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> UInts:
    """64 random bits for each pair. Seeds are mixed first: neighbouring seeds (the choices of n > 1) share nothing."""
    state = _mix(seeds.astype(np.uint64) + _GAMMA)
    return _mix(state + _GAMMA * (positions.astype(np.uint64) + np.uint64(1)))


def uniform(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) with 53 random bits for each (seed, position). Shapes [R] int64 -> [R] float64."""
    return (hash64(seeds, positions) >> _S11).astype(np.float64) * 2.0**-53
