"""GPUs that people have: what `kvern inspect` looks whether a model fits on."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """`memory` is in bytes, as the driver reports it to programs, which is a little less than what is printed on the
    box; drivers and ECC settings move it by a percent."""

    name: str
    memory: int


def _card(name: str, gib: float) -> Card:
    return Card(name, int(gib * GIB))


CARDS = (
    _card("L4 24 GB", 22.0),
    _card("A10G 24 GB", 22.1),
    _card("L40S 48 GB", 44.4),
    _card("A100 40 GB", 39.4),
    _card("A100 80 GB", 79.2),
    _card("H100 80 GB", 79.2),
    _card("H200 141 GB", 139.0),
    _card("B200 192 GB", 178.3),
    _card("MI300X 192 GB", 191.7),
)
