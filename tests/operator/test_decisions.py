"""`kvern explain`'s tables of decisions, and `--what-if`, as people read them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from recorded import NOW, ago, condition, service

from kvern_cli.decisions import decision_blocks
from kvern_cli.explain import explain
from kvern_cli.main import main
from kvern_cli.picture import Picture, cluster_picture
from kvern_cli.render import plain
from kvern_cli.shared import shared_of
from kvern_cli.whatif import WhatIfError, parse, what_if
from kvern_operator.autoscale.expect import expect, read
from kvern_operator.autoscale.layout import Look, Sizes, State, plan
from kvern_operator.autoscale.replicas import decide
from kvern_operator.autoscale.terms import Full, Limits, Line, Load, Memory, Replica, Step, Traffic, View

READY = [condition("Ready", "True", "AllReplicasReady"), condition("Available", "True", "Answering")]
LIMITS = Limits(minimum=1, maximum=6, gpus=2, gpu_budget=8, itl_slo=0.025, ttft_slo=2.0)
SPEC = {
    "resources": {"gpusPerPod": 2, "nodesPerReplica": 1},
    "parallelism": {"tensor": {"mode": "Auto", "size": 1, "min": 1, "max": 2}},
    "autoscaling": {
        "mode": "Internal",
        "minReplicas": 1,
        "maxReplicas": 6,
        "gpuBudget": 8,
        "kvTarget": "0.80",
        "slo": {"ttftP95Ms": 2000, "itlP95Ms": 25},
    },
}
OPTIONS = [
    {"size": 1, "engines": 2, "replicas": 3, "itlMs": "12.1", "whyNot": ""},
    {"size": 2, "engines": 1, "replicas": 2, "itlMs": "9.4", "whyNot": ""},
    {"size": 4, "engines": 1, "replicas": None, "itlMs": None, "whyNot": "outside of 1..2"},
]


def decided(rate: float = 12.0) -> dict:
    """A real decision, as status holds it."""
    load = Load(800_000.0, 160_000.0, 1.0, 40.0, speed=11_000.0)
    traffic = Traffic(1600.0, 400.0, rate=rate, recent=rate, prefill_seconds=0.12, itl=0.014, ttft=0.4)
    replicas = tuple(Replica(f"r{i}", True, 900.0, load=load) for i in range(2))
    view = View(1000.0, 2, replicas, traffic=traffic, line=Line(0.006, 0.0002), step=Step(256, 8192, 2))
    memory = replace(Memory.new(0.0), seen_at=995.0, full=(Full(160_000.0, 1800.0, 11_000.0),) * 3)
    made, _ = decide(LIMITS, view, memory)
    return {
        "time": ago(90),
        "from": made.current,
        "to": made.target,
        "kind": made.kind,
        "cause": made.terms[-1].name,
        "wanted": made.wanted,
        "reason": made.reason,
        "limitedBy": made.limited_by,
        "terms": [{"name": t.name, "wanted": t.wanted, "words": t.words} for t in made.terms],
        "inputs": dict(made.inputs),
    }


def picture(**more) -> Picture:
    older = {"time": ago(900), "from": 1, "to": 2, "kind": "up", "cause": "queue", "reason": "queue: 12 requests wait"}
    last = decided()
    status = {
        "readyReplicas": 2,
        "desiredReplicas": 3,
        "capacity": {"gpus": 4},
        "autoscaling": {"mode": "Internal", "lastDecision": last, "history": [older, last]},
        "parallelism": {
            "current": 1,
            "target": 1,
            "feasible": [{"size": 1, "kvTokens": 800_000}, {"size": 2, "kvTokens": 950_000}],
            "lastDecision": {
                "time": ago(30),
                "from": 1,
                "to": 1,
                "recommended": 1,
                "reason": "nothing calls for another size",
                "options": OPTIONS,
            },
            "history": [{"time": ago(4000), "from": 2, "to": 1, "recommended": 1, "reason": "half would do"}],
        },
        **more,
    }
    svc = service(*READY, spec=SPEC, **status)
    return cluster_picture(svc, [], [], [], place="context kind", now=NOW, kubectl="kubectl")


def test_the_last_decisions_what_each_term_wanted_and_why_the_others_lost():
    lines = plain(decision_blocks(picture()))
    text = "\n".join(lines)
    start = lines.index("Decisions about replicas:")
    assert lines[start + 1].split() == ["AGO", "REPLICAS", "CAUSE", "LIMITED", "BY", "WHY"]
    assert lines[start + 2].split()[:5] == ["90s", "2", "->", "4", "rate"]
    assert (
        "rate: 16.07 requests/s (12.00 come, 12.00 expected, 4.07 for the queue) / 5.50 a replica" in lines[start + 2]
    )
    assert lines[start + 3].split()[:4] == ["15m", "1", "->", "2"]
    terms = lines[lines.index("What each term wants (90s ago):") + 2 :]
    assert terms[0].split()[:3] == ["rate", "4", "decides"]
    assert [line.split()[2] for line in terms[1:3]] == ["fewer", "fewer"]
    assert "80 running, 2 waiting, 0 preempted, 0 held" in text
    assert "ITL = 6.000 ms + 0.2000 ms x running; 2 engines of 256 rows a replica" in text
    sizes = lines[lines.index("Tensor sizes (30s ago: nothing calls for another size):") + 2 :]
    assert sizes[0].split() == ["1", "2", "3", "12.1", "ms", "runs"]
    assert sizes[2].split()[:4] == ["4", "1", "-", "-"] and sizes[2].endswith("outside of 1..2")
    assert "2 -> 1   half would do" in text


def test_what_the_planner_waits_for_is_said_where_it_weighs_no_size():
    reason = "no pod has run yet, and resources.gpuType does not name the card, so that its memory is not known"
    layout = {"lastDecision": {"time": ago(30), "from": 1, "to": 1, "recommended": 1, "reason": reason}}
    lines = plain(decision_blocks(picture(parallelism=layout)))
    (line,) = [line for line in lines if line.startswith("Tensor size")]
    assert line.split(maxsplit=2)[2] == f"{reason} (30s ago)"


def test_what_it_wants_is_what_was_decided_and_not_what_the_spec_began_with():
    layout = {"current": 2, "target": 2}
    wants = dict(explain(picture(parallelism=layout)).rows)["It wants"]
    assert wants[0].startswith("3 replicas of ")  # spec.replicas is 1
    assert wants[1].endswith("with 2 GPUs; tensor size 2.")  # and parallelism.tensor.size is 1
    assert wants[2] == "autoscaling.mode is Internal, with 1 to 6 replicas."
    stays = {"time": ago(42), "from": 2, "to": 2, "reason": "2 replicas are right: kv: demand of 9 tokens"}
    said = dict(explain(picture(autoscaling={"lastDecision": stays})).rows)["Decided"]
    assert said == ("2 replicas as before, 42s ago: 2 replicas are right: kv: demand of 9 tokens.",)


def test_where_nobody_decides_there_is_no_table():
    svc = service(*READY)
    assert decision_blocks(cluster_picture(svc, [], [], [], place="here", now=NOW, kubectl="kubectl")) == []


def test_what_if_stands_beside_what_runs():
    text = "\n".join(plain(what_if(picture(), {"tensor": 2, "replicas": 4})))
    first = text.splitlines()[0]
    assert first == "smol with tensor=2, replicas=4: it keeps the SLO of ITL and TTFT, with 1 replica to spare."
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert (rows["tensor size"], rows["replicas"]) == (["1", "2"], ["2", "4", "1", "to", "4"])
    assert rows["GPUs"][:2] == ["4", "8"]
    assert rows["engines"][:2] == ["4", "4"]
    assert rows["KV cache, tokens"][:2] == ["1,600,000", "3,800,000"]
    assert "Size 2 is computed from size 1: a step on twice the devices is taken to be 1.74 times as fast." in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"replicas": 7}, "It is not allowed: autoscaling.gpuBudget is 8, and it would take 14 GPUs."),
        ({"replicas": 0}, "It is not allowed: autoscaling.minReplicas is 1."),
        ({"replicas": 1}, "It is too little: the load needs 3 replicas of that size (rate)."),
    ],
)
def test_what_cannot_be_is_said(asked, said):
    lines = plain(what_if(picture(), asked))
    assert ": no, for " in lines[0] and any(line.endswith(said) for line in lines)


def sharer(name: str, gpus: int, priority: int, least: int = 1, mode: str = "Internal") -> dict:
    scaling = {"mode": mode, "minReplicas": least, "maxReplicas": 9, "priority": priority}
    spec = {"resources": {"gpusPerPod": 1}, "autoscaling": scaling}
    return {"metadata": {"name": name}, "spec": spec, "status": {"capacity": {"gpus": gpus}}}


@pytest.mark.parametrize(
    ("gpus", "others", "asked", "said"),
    [
        ("6", [], 4, "the namespace has 6 GPUs in all (ConfigMap kvern-budget), and it would take 8."),
        (
            "8",
            [sharer("batch", 3, -5)],
            4,
            "It would take 4 GPUs more, and 1 of the namespace's 8 are free (ConfigMap kvern-budget); the others have "
            "batch 3, and must not give that many.",
        ),
        (
            "8",
            [sharer("batch", 3, -5)],
            3,
            "It would take 2 GPUs more, and 1 of the namespace's 8 are free: services of lower priority (batch) would "
            "have to let go first.",
        ),
        ("8", [sharer("batch", 3, 0)], 3, "the others have batch 3, and must not give that many."),
        ("8", [sharer("batch", 3, -5, mode="External")], 3, "the others have batch 3, and must not give that many."),
    ],
)
def test_what_the_namespaces_budget_says_to_it(gpus, others, asked, said):
    shared = shared_of({"data": {"gpus": gpus}}, [service(*READY, spec=SPEC), *others], "smol")
    lines = plain(what_if(replace(picture(), shared=shared), {"replicas": asked}))
    assert ": no, for " in lines[0] and any(line.endswith(said) for line in lines), lines
    (row,) = [line for line in lines if line.startswith("GPUs")]
    assert f"of the namespace's {gpus}" in row


def test_what_fits_the_namespaces_budget_is_not_spoken_of_as_trouble():
    shared = shared_of({"data": {"gpus": "12"}}, [service(*READY, spec=SPEC), sharer("batch", 3, 5)], "smol")
    lines = plain(what_if(replace(picture(), shared=shared), {"replicas": 4}))
    assert "with 1 replica to spare" in lines[0], lines
    (row,) = [line for line in lines if line.startswith("GPUs")]
    assert row.split()[1:3] == ["4", "8"] and row.endswith("8 (gpuBudget), 9 of the namespace's 12")
    less = plain(what_if(replace(picture(), shared=replace(shared, gpus=2)), {"replicas": 1}))
    assert not any("namespace has" in line for line in less)  # fewer are always allowed


def test_a_budget_that_is_not_known_is_said():
    shared = shared_of({"data": {"gpus": "many"}}, [], "smol")
    text = "\n".join(plain(what_if(replace(picture(), shared=shared), {"replicas": 4})))
    assert 'Not weighed: ConfigMap kvern-budget: gpus: "many" is not a whole number of GPUs.' in text


def test_a_size_that_the_planner_refuses_says_why():
    banned = [{**OPTIONS[1], "whyNot": "was tried, made latency worse and is banned for six hours"}]
    layout = {
        "current": 1,
        "feasible": [{"size": 1, "kvTokens": 800_000}, {"size": 2, "kvTokens": 950_000}],
        "lastDecision": {"time": ago(30), "from": 1, "to": 1, "recommended": 1, "reason": "r", "options": banned},
    }
    text = plain(what_if(picture(parallelism=layout), {"tensor": 2}))
    assert (
        "The planner would not choose size 2: was tried, made latency worse and is banned for six hours."
        in "\n".join(text)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'nothing' is neither tensor=SIZE nor replicas=NUMBER"),
        ("tensor", "'tensor' is neither tensor=SIZE nor replicas=NUMBER"),
        ("gpus=3", "'gpus=3' is neither tensor=SIZE nor replicas=NUMBER"),
        ("tensor=two", "tensor=two: a whole number from 1 to 10000 is wanted"),
        ("tensor=0", "tensor=0: a whole number from 1 to 10000 is wanted"),
        ("replicas=-1", "replicas=-1: a whole number from 0 to 10000 is wanted"),
        ("replicas=99999", "replicas=99999: a whole number from 0 to 10000 is wanted"),
        ("replicas=2,replicas=3", "replicas is given twice"),
    ],
)
def test_bad_questions_get_an_answer(text, said, capsys):
    with pytest.raises(WhatIfError, match=said.replace("(", "\\(")):
        parse(text)
    assert main(["explain", "smol", "--local", "--what-if", text]) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_known_is_said_and_what_helps():
    with pytest.raises(WhatIfError, match="tensor=3: the pods of smol can have the sizes 1, 2 and no other"):
        what_if(picture(), {"tensor": 3})
    idle = cluster_picture(service(*READY), [], [], [], place="here", now=NOW, kubectl="kubectl")
    with pytest.raises(
        WhatIfError, match=r"nothing is known of the load of smol yet \(autoscaling.mode is Off\); set it"
    ):
        what_if(idle, {"replicas": 3})


def test_it_reckons_as_the_decisions_do():
    """Where rows, not memory, are full, --what-if names the number that the term `kv` of the same decision names."""
    load = Load(800_000.0, 150_000.0, 40.0, 256.0)
    replicas = tuple(Replica(f"r{i}", True, 900.0, load=load) for i in range(2))
    traffic = Traffic(500.0, 200.0, rate=12.0, prefill_seconds=0.05)
    view = View(1000.0, 2, replicas, traffic=traffic, line=Line(0.03, 0.0002), step=Step(256, 4096, 2))
    limits = replace(LIMITS, gpus=2, gpu_budget=None, ttft_slo=None)
    made, _ = decide(limits, view, replace(Memory.new(0.0), seen_at=995.0))
    (term,) = made.terms  # the SLO cannot be kept with any number, and asks for none
    known = read(made.inputs, size=1, gpus=2, pipeline=1, kv={1: 8e5, 2: 9.5e5})
    found = expect(known, limits, 1, 2)
    assert (term.name, term.wanted, found.needed, found.binding) == ("kv", 2, 2, "kv")
    options = Look(1000.0, 1, 2, ((1, 800_000), (2, 950_000)))
    planned, _ = plan(Sizes("Auto"), limits, view, options, State(1))
    slow, larger = planned.options
    assert math.isinf(slow.replicas) and larger.replicas == expect(known, limits, 2, 2).needed


def test_more_replicas_are_never_expected_to_be_slower_or_fuller():
    known = read(decided()["inputs"], size=1, gpus=2, pipeline=1, kv={1: 8e5, 2: 9.5e5})
    for size in (1, 2):
        found = [expect(known, LIMITS, size, n) for n in range(1, 12)]
        for less, more in pairwise(found):
            assert more.usage < less.usage and more.itl <= less.itl and more.ttft <= less.ttft
            assert (more.busy, more.needed) < (less.busy, less.needed + 1)
    assert math.isinf(expect(replace(known, rate=1000.0), LIMITS, 1, 1).ttft)
    with pytest.raises(ValueError, match="no numbers of the load"):
        read({}, size=1, gpus=1, pipeline=1, kv={})
