"""How the pods of one engine service meet: the leading pod listens, the others report to it and keep in touch.

The ranks are shared evenly, in order: pod k of n has ranks k*world/n .. (k+1)*world/n - 1. The leading pod (node 0)
runs API servers and cores; the others run workers only (`follower.py`), whose sockets the cores reach over TCP. Here:
who is where, what is said (msgspec over one ZeroMQ socket, never pickle), and the leader's side of it. The leader
listens on the one address that --master-addr names. What a lost pod means is decided in `supervisor.py`.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import zmq

from kvern_engine import __version__, logs
from kvern_engine.config import EngineConfig
from kvern_engine.parallel.layout import Layout

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENT_SECONDS = 3.5  # a pod that is not heard of for so long is lost: its engines must end within 5 s
# Settings that each pod has for itself.
_OWN = {"node_rank", "node_addr", "host", "port", "uds", "admin_host", "admin_port", "admin_token_file", "api_key"}
_OWN |= {"log_level", "log_format", "access_log", "record_step_plans", "api_server_count"}


class Join(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A pod reports: its address, a free port there (for engines whose first rank it has), and how it was started."""

    node: int
    address: str
    port: int
    version: str
    settings: dict[str, str]


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    reason: str


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All pods are there. `rendezvous`: where the ranks of an engine meet, for engines that span pods."""

    rendezvous: dict[int, str]


class Endpoints(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The pod's workers are bound: socket name -> TCP endpoint."""

    node: int
    endpoints: dict[str, str]


class RankDied(msgspec.Struct, array_like=True, frozen=True, tag=True):
    node: int
    rank: int
    how: str


class EndEngine(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """This engine is dead: end what is left of it in your pod."""

    engine: int


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=True):
    node: int


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The leader ends."""


ToLeader = Join | Endpoints | RankDied | Beat
ToFollower = Refused | Welcome | EndEngine | Beat | Stop
encode = msgspec.msgpack.Encoder().encode
decode_to_leader: Callable[[bytes], ToLeader] = msgspec.msgpack.Decoder(ToLeader).decode
decode_to_follower: Callable[[bytes], ToFollower] = msgspec.msgpack.Decoder(ToFollower).decode


# ---------------------------------------------------------------- who is where (pure)


def ranks_of_node(layout: Layout, nnodes: int, node: int) -> range:
    """The ranks of a pod; `nnodes` divides the layout's world."""
    each = layout.world // nnodes
    return range(node * each, (node + 1) * each)


def node_of(layout: Layout, nnodes: int, rank: int) -> int:
    return rank // (layout.world // nnodes)


def spans_nodes(layout: Layout, nnodes: int, engine: int) -> bool:
    """Whether the ranks of an engine are in several pods."""
    ranks = layout.ranks_of(engine)
    return node_of(layout, nnodes, ranks[0]) != node_of(layout, nnodes, ranks[-1])


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 2 and 3`, `ranks 4 to 7`."""
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {numbers[0]} {'and' if len(numbers) == 2 else 'to'} {numbers[-1]}"


def shared_settings(config: EngineConfig) -> dict[str, str]:
    """What must be the same in all pods."""
    return {name: str(value) for name, value in config.model_dump(exclude=_OWN).items()}


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """In words, the first setting that the leader and another pod do not share; None where there is none."""
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            return f"--{name.replace('_', '-')} is {theirs.get(name)} there and {ours.get(name)} here"
    return None


# ---------------------------------------------------------------- addresses


class AddressError(OSError):
    """An address cannot be used; the text is for the user."""


def resolve(name: str) -> str:
    """The address of a DNS name, IPv4 where there is one. Raises AddressError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"--master-addr {name}: no such name ({error.strerror})") from None
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


def own_address(towards: str) -> str:
    """The address of this machine from which it reaches `towards`; nothing is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """A port that nobody listens at now on `address`."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def url(address: str, port: int) -> str:
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"


# ---------------------------------------------------------------- the leader's side


@dataclass
class _Node:
    identity: bytes = b""
    join: Join | None = None
    endpoints: dict[str, str] | None = None
    heard: float = 0.0
    lost: bool = False


@dataclass
class News:
    """What the leader has learnt since it last looked: ranks that died, pods that are lost (with the reason)."""

    died: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)


class Leader:
    """The leading pod's view of the others. Raises AddressError where it cannot listen."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: EngineConfig) -> None:
        self._config, self._layout = config, Layout.of(config)
        self._settings = shared_settings(config)
        self._nodes = {node: _Node() for node in range(1, config.nnodes)}
        # Its own name may not be known yet when it starts (a StatefulSet's pod): its address is, where it was told.
        self.address = config.node_addr or resolve(str(config.master_addr))
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a pod that comes again takes its name over
        if ":" in self.address:
            self.socket.setsockopt(zmq.IPV6, 1)
        try:
            self.socket.bind(url(self.address, config.master_port))
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise AddressError(self._why_not(error)) from None
        self._began = time.monotonic()
        self._beat_at = 0.0
        self._welcome: Welcome | None = None

    def _why_not(self, error: zmq.ZMQError) -> str:
        config = self._config
        if error.errno == zmq.EADDRINUSE:
            return (
                f"port {config.master_port} on {self.address} is already in use: stop what listens there, or choose "
                "another with --master-port (in all pods)"
            )
        if error.errno == zmq.EADDRNOTAVAIL:
            return (
                f"--master-addr {config.master_addr} ({self.address}) is no address of this machine: node 0 is to be "
                "started where it is"
            )
        return f"cannot listen at {self.address} port {config.master_port}: {error.strerror}"

    def missing(self) -> list[int]:
        """Pods that have not joined."""
        return [number for number, node in self._nodes.items() if node.join is None]

    def missing_text(self) -> str:
        """Who is missing and for how long, for people."""
        waited, config = time.monotonic() - self._began, self._config
        named = [f"node {n} ({name_ranks(ranks_of_node(self._layout, config.nnodes, n))})" for n in self.missing()]
        return (
            f"{' and '.join(named)} of {config.nnodes} did not join within {waited:.0f} s at {self.address} port "
            f"{config.master_port}: is it running, with --node-rank {self.missing()[0]} and --master-addr "
            f"{config.master_addr}?"
        )

    @property
    def waited(self) -> float:
        """Seconds since the leader listens."""
        return time.monotonic() - self._began

    def endpoints(self) -> dict[str, str] | None:
        """Where the workers of the other pods are bound; None until all have said so."""
        known = [node.endpoints for node in self._nodes.values()]
        if any(one is None for one in known):
            return None
        return {name: endpoint for one in known if one for name, endpoint in one.items()}

    def place(self, node: int) -> str:
        """`node 1 (127.0.0.3)`."""
        join = self._nodes[node].join
        return f"node {node}" + (f" ({join.address})" if join else "")

    def welcome(self) -> dict[int, str]:
        """All pods are there: tell them where their engines meet. Returns that, for the leader's own ranks."""
        meeting = {}
        for engine in range(self._layout.data):
            if spans_nodes(self._layout, self._config.nnodes, engine):
                first = node_of(self._layout, self._config.nnodes, self._layout.ranks_of(engine)[0])
                join = self._nodes[first].join if first else None
                meeting[engine] = url(join.address, join.port) if join else url(self.address, free_port(self.address))
        self._welcome = Welcome(meeting)
        self.tell(self._welcome)
        return meeting

    def tell(self, message: ToFollower) -> None:
        for node in self._nodes.values():
            if node.identity and not node.lost:
                self._send(node.identity, message)

    def _send(self, identity: bytes, message: ToFollower) -> None:
        self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    def read(self) -> News:
        """Take in what the pods have said, answer their beats, and see who is silent."""
        news, now = News(), time.monotonic()
        while self.socket.poll(0):
            identity, data = self.socket.recv_multipart()
            try:
                self._handle(identity, decode_to_leader(data), now, news)
            except msgspec.MsgspecError:
                log.warning("a message at the master port is none of ours", extra=logs.fields(bytes=len(data)))
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self.tell(Beat(0))
        for number, node in self._nodes.items():
            if node.join is not None and not node.lost and now - node.heard > SILENT_SECONDS:
                node.lost = True
                ranks = name_ranks(ranks_of_node(self._layout, self._config.nnodes, number))
                silence = f"{now - node.heard:.1f} s"
                news.lost.append((number, f"{self.place(number)}, with {ranks}, was not heard of for {silence}"))
        return news

    def _handle(self, identity: bytes, message: ToLeader, now: float, news: News) -> None:
        node = self._nodes.get(message.node)
        if isinstance(message, Join) and node is not None and node.join == message:  # it has not heard the answer
            node.identity, node.heard = identity, now
            self._send(identity, self._welcome or Beat(0))
        elif isinstance(message, Join):
            problem = self._refusal(message)
            if problem is not None or node is None:
                log.warning("a pod was refused", extra=logs.fields(node=message.node, reason=problem))
                self._send(identity, Refused(problem or ""))
                return
            if node.join is None:
                log.info("a pod has joined", extra=logs.fields(node=message.node, address=message.address))
            node.identity, node.join, node.heard = identity, message, now
            self._send(identity, Beat(0))
        elif node is not None and node.identity == identity:
            node.heard = now
            if isinstance(message, Endpoints):
                node.endpoints = message.endpoints
            elif isinstance(message, RankDied):
                news.died.append((message.rank, f"worker {message.rank} on {self.place(message.node)} {message.how}"))

    def _refusal(self, join: Join) -> str | None:
        if join.version != __version__:
            return f"node {join.node} is Kvern {join.version}, the leader {__version__}: use the same image"
        if join.node not in self._nodes:
            return f"--node-rank must be within 1..{self._config.nnodes - 1}, got {join.node}"
        difference = first_difference(self._settings, join.settings)
        if difference is not None:
            return f"node {join.node} was started differently: {difference}"
        known = self._nodes[join.node]
        if known.join is not None:
            return f"node {join.node} has joined already, from {known.join.address}: each pod needs its own --node-rank"
        return None

    def close(self) -> None:
        """Tell the others that it is over."""
        self.tell(Stop())
        self.socket.close()
