"""Sampling and the decode step's inputs in Triton against their references: interpreted on a CPU, compiled on a GPU.

Run by `test_triton_sampling.py` in a process of its own, or directly: `pytest tests/kernels/sampling_cases.py`.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kvern_kernels import SamplingTables, decode_inputs, decode_inputs_triton, sampling, sampling_triton

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Interpreted, a row takes half a second: then each case has one of the types, the cases have all of them.
FULL = DEVICE == "cuda" or os.environ.get("KVERN_TEST_FULL") == "1"
DTYPES = [torch.float32, torch.bfloat16]


def with_dtypes(cases):
    """Each case with each type, or in turn with one of them."""
    if FULL:
        return [(case, dtype) for case in cases for dtype in DTYPES]
    return [(case, DTYPES[i % 2]) for i, case in enumerate(cases)]


def named(value):
    """A case's name from its values, whichever cases stand beside it."""
    if isinstance(value, dict):
        return "-".join(value) or "plain"
    return str(value).removeprefix("torch.")


def state_of(rows, vocab, **columns):
    """Tables of `rows` + 1 rows; the last one is greedy."""
    defaults = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0}
    parts = {}
    for name, default in defaults.items():
        values = columns.get(name, [default] * rows)
        dtype = torch.int64 if name == "top_k" else torch.float32
        parts[name] = torch.tensor([*values, 0 if name == "temperature" else default], dtype=dtype, device=DEVICE)
    return SamplingTables(**parts)


def run_both(logits, state, uniform, rows=None):
    """(token ids by Triton, by the reference); checks that both write the same into the token table."""
    count = len(logits)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE) if rows is None else rows
    places = torch.arange(count, device=DEVICE) * 3 + 1
    places[-1] = -1
    tables = [torch.full((count, 3), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    got = sampling_triton.sample_tokens(logits, rows, state, uniform, tables[0], places)
    expected = sampling.sample_tokens(logits, rows, state, uniform, tables[1], places)
    assert torch.equal(tables[0][:-1, 1].long(), got[:-1])
    assert (tables[0][:, 0] == -7).all() and (tables[0][-1] == -7).all()
    assert torch.equal(tables[0], tables[1]) or not torch.equal(got, expected)
    return got, expected


@pytest.mark.parametrize(("vocab", "dtype"), with_dtypes([1, 100, 8192, 3001]), ids=named)
def test_greedy_takes_the_first_of_the_largest(vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab + 8, device=DEVICE).to(dtype)[:, :vocab]
    logits[1] = 2.5  # all equal
    logits[2, vocab // 2 :] = logits[2].max() + 1
    for uniform in (None, torch.rand(4, dtype=torch.float64, device=DEVICE)):
        got, expected = run_both(logits, state_of(4, vocab, temperature=[0.0] * 4), uniform)
        assert got.tolist() == expected.tolist()
    assert got.tolist()[1:3] == [0, vocab // 2]


SETTINGS = [
    {},
    {"temperature": [0.3, 1.0, 2.0, 0.0, 0.7, 1.3]},
    {"top_k": [1, 2, 5, 40, 300, 3001]},
    {"top_p": [0.01, 0.5, 0.9, 0.99, 0.3, 1.0]},
    {"min_p": [0.0, 0.01, 0.3, 1.0, 0.1, 0.05]},
    {"top_k": [50, 3, 3001, 10, 7, 1], "top_p": [0.9, 0.5, 0.8, 1.0, 0.95, 0.2], "min_p": [0.0, 0.1, 0.02, 0, 0, 0.2]},
]


@pytest.mark.parametrize(
    ("setting", "dtype"),
    with_dtypes(SETTINGS),
    ids=named,
)
def test_draws_as_the_reference(setting, dtype):
    vocab = 3001 if dtype == torch.bfloat16 else 8195
    torch.manual_seed(len(setting))
    same = total = 0
    for scale in (1.0, 6.0) if FULL else (3.0,):
        logits = (torch.randn(6, vocab, device=DEVICE) * scale).to(dtype)
        uniform = torch.rand(6, dtype=torch.float64, device=DEVICE)
        uniform[0], uniform[5] = 0.0, 1 - 2**-53
        state = state_of(6, vocab, **setting)
        got, expected = run_both(logits, state, uniform)
        same += int((got == expected).sum())
        total += 6
        assert ((got >= 0) & (got < vocab)).all()
    # Sums in another order: a random number may fall on the other side of a boundary, but hardly ever.
    assert same >= total - 1


def test_never_draws_what_is_banned():
    vocab = 9001
    logits = torch.randn(3, vocab, device=DEVICE)
    logits[:, ::2] = float("-inf")
    logits[2] = float("-inf")
    logits[2, 8999] = 1.0
    for number in (0.0, 0.3, 0.999999, 1 - 2**-53) if FULL else (0.3, 1 - 2**-53):
        uniform = torch.full((3,), number, dtype=torch.float64, device=DEVICE)
        got, _ = run_both(logits, state_of(3, vocab, top_k=[vocab, 100, 5], top_p=[1.0, 0.9, 0.9]), uniform)
        assert (got[:2] % 2 == 1).all() and got[2] == 8999


def test_a_distribution():
    """Draws from four tokens come as often as they should."""
    count, tolerance = (4000, 0.03) if DEVICE == "cuda" else (40, 0.2)  # each takes its time where it is interpreted
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], device=DEVICE, dtype=torch.bfloat16).expand(count, 4).contiguous()
    uniform = torch.rand(count, dtype=torch.float64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    rows = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    got, _ = run_both(logits, state_of(1, 4, temperature=[0.8], top_p=[0.97]), uniform, rows)
    wanted = (torch.tensor([0.0, 1.0, 2.0]) / 0.8).softmax(0)  # the fourth has 1.7 %, the first three over 97 %
    shares = torch.bincount(got, minlength=4).float().cpu() / count
    assert shares[3] == 0
    assert torch.allclose(shares[:3], wanted, atol=tolerance)


@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_inputs(block_size):
    torch.manual_seed(block_size)
    tokens = torch.randint(0, 1000, (6, 301), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 99, (6, -(-301 // block_size)), dtype=torch.int32, device=DEVICE)
    tables[-1] = -1
    rows = torch.tensor([3, 0, 4, 5, 5], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 299, block_size, -1, -1], dtype=torch.int32, device=DEVICE)
    got = decode_inputs_triton.decode_inputs(rows, positions, tokens, tables, block_size)
    expected = decode_inputs.decode_inputs(rows, positions, tokens, tables, block_size)
    for name in ("token_ids", "positions", "slots", "seq_lens", "places"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.seq_lens.tolist() == [1, 300, block_size + 1, 0, 0] and got.slots.tolist()[3:] == [-1, -1]
    for i, position in enumerate(positions.tolist()):
        used = (position + block_size) // block_size
        assert torch.equal(got.block_tables[i, :used], expected.block_tables[i, :used])


COMBINED = [
    {"temperature": [0.7]},
    {"top_k": [5]},
    {"top_p": [0.8]},
    {"min_p": [0.1]},
    {"top_k": [20], "top_p": [0.9], "temperature": [1.6]},
    {"top_p": [0.7], "min_p": [0.02], "temperature": [2.0]},
    {"top_k": [11], "top_p": [0.95], "min_p": [0.05], "temperature": [0.5]},
]


def kept_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What is left of softmax(logits / temperature), in float64."""
    probs = ((logits.double() - logits.double().max()) / temperature).exp()
    probs[probs < min_p * probs.max()] = 0
    falling, order = probs.sort(descending=True)
    if top_k:
        falling[top_k:] = 0
    falling /= falling.sum()
    falling[falling.cumsum(0) - falling >= top_p] = 0
    return torch.zeros_like(probs).scatter_(0, order, falling / falling.sum())


FEW = COMBINED if FULL else COMBINED[-1:]


@pytest.mark.parametrize("setting", FEW, ids=lambda setting: ",".join(setting))
def test_every_token_has_its_share_of_the_random_numbers(setting):
    """Numbers spread evenly over [0, 1) meet each token as often as its probability says, give or take one."""
    count, vocab = (4000 if DEVICE == "cuda" else 8), 50
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 2).bfloat16().to(DEVICE)
    uniform = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(DEVICE)
    rows = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    probs = kept_distribution(logits.cpu(), **{name: value[0] for name, value in setting.items()})
    for got in run_both(logits.expand(count, vocab).contiguous(), state_of(1, vocab, **setting), uniform, rows):
        counts = torch.bincount(got.cpu(), minlength=vocab)
        assert counts[probs == 0].sum() == 0
        assert (counts - probs * count).abs().max() <= 1.01


def test_a_row_is_drawn_alike_in_any_batch():
    """To the last bit of its decision: alone, among others, and at another place."""
    vocab = 9001
    logits = (torch.randn(7, vocab, device=DEVICE) * 2).bfloat16()
    uniform = torch.rand(7, dtype=torch.float64, device=DEVICE)
    setting = {
        "temperature": [0.5, 0.0, 1.0, 1.5, 0.8, 1.0, 2.0],
        "top_k": [vocab, vocab, 40, vocab, 300, vocab, vocab],
        "top_p": [0.9, 1.0, 1.0, 0.5, 0.95, 1.0, 0.99],
        "min_p": [0.0, 0.0, 0.0, 0.01, 0.0, 0.1, 0.0],
    }
    state = state_of(7, vocab, **setting)
    together, _ = run_both(logits, state, uniform)
    for picked in ([3], [6, 0, 2]):
        rows = torch.tensor(picked, dtype=torch.int32, device=DEVICE)
        alone, _ = run_both(logits[picked], state, uniform[picked], rows)
        assert alone.tolist() == together[picked].tolist()
