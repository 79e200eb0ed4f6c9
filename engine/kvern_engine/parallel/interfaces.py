"""Which network interface the ranks talk over: the one that has this pod's address. gloo and NCCL want its name, and
would otherwise choose by themselves.

`interface_of` is pure; `use_interface` looks at this machine and sets the environment that both libraries read.
"""

import ipaddress
import os
from collections.abc import Iterable, Mapping

BIND_ADDRESS = "KVERN_BIND_ADDRESS"
_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str, networks: Mapping[str, Iterable[tuple[str, str | None]]]) -> str | None:
    """The interface that has `address`, or whose network it is in (127.0.0.3 is in that of lo); None: none has it.
    `networks`: interface -> (address, netmask).
    """
    wanted = ipaddress.ip_address(address)
    near = None
    for name, known in networks.items():
        for own, mask in known:
            try:
                bits = f"/{int(ipaddress.ip_address(mask)).bit_count()}" if mask else ""
                interface = ipaddress.ip_interface(own.partition("%")[0] + bits)
            except ValueError:  # no IP address
                continue
            if interface.ip == wanted:
                return name
            if near is None and wanted in interface.network and interface.ip.is_loopback:
                near = name
    return near


def use_interface() -> None:
    """Make gloo and NCCL use the interface of KVERN_BIND_ADDRESS; what the user has set stays."""
    import psutil

    address = os.environ.get(BIND_ADDRESS)
    if not address:
        return
    networks = {name: [(a.address, a.netmask) for a in known] for name, known in psutil.net_if_addrs().items()}
    name = interface_of(address, networks)
    if name is not None:
        for variable in _NAMES:
            os.environ.setdefault(variable, name)
