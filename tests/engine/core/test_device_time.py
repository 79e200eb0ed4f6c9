"""How idle time on the device is counted, and that it is none of it where the engine rests."""

import pytest

from kvern_engine.core.device_time import DeviceTime


def test_totals_and_the_share_of_the_latest_second() -> None:
    time = DeviceTime()
    assert time.idle_fraction == 0.0
    for step in range(8):
        assert time.idle_fraction == 0.0  # not a whole second yet
        time.add(step, 0.109375, 0.015625)
    assert (time.busy, time.idle, time.idle_fraction) == (0.875, 0.125, 0.125)
    time.add(10, 0.5, 0.0)
    assert time.idle_fraction == 0.125
    time.add(11, 0.5, 0.0)
    assert time.idle_fraction == 0.0


def test_rest_is_not_idleness() -> None:
    time = DeviceTime()
    time.rest(0)
    time.add(0, 0.5, 0.0)
    time.rest(1)
    time.add(1, 0.5, 3600.0)
    assert time.idle == 0.0
    time.add(2, 0.5, 0.1)
    assert time.idle == pytest.approx(0.1)
