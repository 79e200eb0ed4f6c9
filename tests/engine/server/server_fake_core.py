"""An engine core that computes nothing: it speaks the real messages over real sockets and answers with tokens that the
test chose. One thread; a step gives every running choice one token."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.ipc import Abort, AddRequest, CoreReady, EngineDead, EngineStats, Outputs, ToCore, TokenOutput

Reply = Callable[[AddRequest, int], list[int]]


@dataclass
class _Running:
    request: AddRequest
    index: int
    tokens: list[int]
    at: int = 0
    aborted: bool = False


@dataclass
class FakeCore:
    """`reply(request, choice)` gives the tokens of a choice; an EOS among them ends it. `step_seconds` is the pace;
    clear `running` to hold it. Seen requests and aborts are kept with their times."""

    socket_dir: str
    engine: int = 0
    servers: int = 1
    num_blocks: int = 1024
    block_size: int = 16
    max_model_len: int = 512
    eos: int = 0
    ready_at_start: bool = True
    reply: Reply = lambda request, choice: [10 + choice] * 64
    step_seconds: float = 0.0005
    cached_tokens: int = 0
    refuse: str | None = None
    requests: list[AddRequest] = field(default_factory=list)
    aborts: dict[str, float] = field(default_factory=dict)
    aborted_choices: list[tuple[str, int]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=lambda: EngineStats(0))

    def __post_init__(self) -> None:
        self.running = threading.Event()
        self.running.set()
        self._stop = threading.Event()
        self._live: list[_Running] = []
        self._extra: list[object] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._live)

    def say(self, message: object) -> None:
        """Send one more message to every API server."""
        self._extra.append(message)

    def become_ready(self) -> None:
        self.say(
            CoreReady(
                self.engine, self.num_blocks, self.block_size, self.max_model_len, {"device": "cuda:0 NVIDIA H200"}
            )
        )

    def die(self, reason: str = "killed by the test", last: bool = True) -> None:
        self.running.clear()
        self.say(EngineDead(self.engine, reason, last))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        context = zmq.Context()
        inbox = context.socket(zmq.PULL)
        inbox.bind(f"ipc://{self.socket_dir}/core-{self.engine}.in")
        outs = []
        for i in range(self.servers):
            out = context.socket(zmq.PUSH)
            out.setsockopt(zmq.RECONNECT_IVL, 5)
            out.connect(f"ipc://{self.socket_dir}/server-{i}.in")
            outs.append(out)
        decode = msgspec.msgpack.Decoder(ToCore).decode
        encode = msgspec.msgpack.Encoder().encode
        if self.ready_at_start:
            self.become_ready()
        last_stats = 0.0
        while not self._stop.is_set():
            wait = 1 if not self._live else 0
            while inbox.poll(wait):
                wait = 0
                self._take(decode(inbox.recv()))
            while self._extra:
                message = encode(self._extra.pop(0))
                for out in outs:
                    out.send(message)
            outputs = self._step() if self.running.is_set() else {}
            now = time.monotonic()
            stats = None
            if now - last_stats > 0.05:
                last_stats = now
                stats = msgspec.structs.replace(
                    self.stats, engine=self.engine, num_running=len(self._live), heartbeat=now, iteration_tokens=[]
                )
            for i, out in enumerate(outs):
                if outputs.get(i) or stats:
                    out.send(encode(Outputs(self.engine, outputs.get(i, []), stats)))
            if self._live:
                time.sleep(self.step_seconds)
        context.destroy(linger=100)

    def _take(self, message: AddRequest | Abort) -> None:
        if isinstance(message, Abort):
            for request_id in message.request_ids:
                self.aborts[request_id] = time.monotonic()
            self.aborted_choices += message.choices
            for r in self._live:
                r.aborted |= (r.request.request_id, r.index) in message.choices
            self._live = [r for r in self._live if r.request.request_id not in self.aborts]
            return
        self.requests.append(message)
        for i in range(message.params.n):
            self._live.append(_Running(message, i, self.reply(message, i)))

    def _step(self) -> dict[int, list[TokenOutput]]:
        outputs: dict[int, list[TokenOutput]] = {}
        left = []
        for r in self._live:
            if self.refuse is not None:
                output = TokenOutput(r.request.request_id, r.index, [], "error", error=self.refuse)
            elif r.aborted:
                output = TokenOutput(r.request.request_id, r.index, [], "abort")
            else:
                output = self._output(r)
            outputs.setdefault(r.request.client, []).append(output)
            if output.finish_reason is None:
                left.append(r)
        self._live = left
        return outputs

    def _output(self, r: _Running) -> TokenOutput:
        params = r.request.params
        token = r.tokens[r.at % len(r.tokens)]
        r.at += 1
        reason = stop = None
        if token in params.stop_token_ids:
            reason, stop = "stop", token
        elif token == self.eos and not params.ignore_eos:
            reason = "stop"
        elif r.at == params.max_tokens:
            reason = "length"
        first = r.at == 1
        ids = r.request.prompt_token_ids
        return TokenOutput(
            r.request.request_id,
            r.index,
            [token],
            reason,
            stop,
            None if params.logprobs is None else [self.logprobs_of(token, params.logprobs)],
            [self.logprobs_of(t, params.prompt_logprobs) for t in ids[1:]]
            if first and r.index == 0 and params.prompt_logprobs is not None
            else None,
            self.cached_tokens if first and r.index == 0 else None,
            time.monotonic() if first else None,
        )

    @staticmethod
    def logprobs_of(token: int, top: int) -> TokenLogprobs:
        others = [t for t in range(100, 100 + top + 1) if t != token]
        ids = [token, *others][:top]
        values = [-0.25, *(-1.5 - i for i in range(top))][:top]
        return TokenLogprobs(token, -0.25, 1, ids, values)
