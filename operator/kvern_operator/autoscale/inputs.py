"""The numbers of a decision, as status.autoscaling shows them and `kvern explain --what-if` reads them. Pure; the names
are those of docs/autoscaling.md."""

from kvern_operator.autoscale.facts import Facts, reachable, tokens
from kvern_operator.autoscale.terms import Limits, View
from kvern_operator.autoscale.wants import served_by


def inputs_of(limits: Limits, view: View, facts: Facts) -> dict[str, str]:
    """The numbers, as status shows them: the names are those of docs/autoscaling.md."""
    loads, traffic = facts.loads, facts.traffic
    found = {
        "ready": str(facts.ready),
        "pending": str(facts.young),
        "overdue": str(facts.overdue),
        "withoutMetrics": str(facts.silent),
        "demandTokens": tokens(facts.demand),
        "running": f"{sum(x.running for x in loads):.0f}",
        "waiting": f"{sum(x.waiting for x in loads):.0f}",
        "preempted": f"{sum(x.preempted for x in loads):.0f}",
        "held": "unknown" if view.held is None else f"{view.held.requests:.0f}",
        "inputTokens": f"{traffic.input_tokens:.0f}",
        "outputTokens": f"{traffic.output_tokens:.0f}",
        "requestsPerSecond": f"{traffic.rate:.2f}",
        "expectedPerSecond": f"{facts.ahead:.2f}",
        "prefillMs": f"{traffic.prefill_seconds * 1000:.1f}",
        "prefixHits": f"{traffic.prefix_hits:.2f}",
        "engines": str(view.step.engines),
        "maxNumSeqs": str(view.step.max_num_seqs),
        "maxNumBatchedTokens": str(view.step.max_num_batched_tokens),
        "startSeconds": f"{view.start_seconds:.0f}",
    }
    if loads:
        found["kvUsage"] = f"{sum(x.used_tokens for x in loads) / max(sum(x.kv_tokens for x in loads), 1.0):.2f}"
        found["kvTokensPerReplica"] = tokens(facts.kv_tokens)
        found["capacityTokens"] = tokens(facts.cap or 0.0)
    if traffic.itl is not None:
        found["itlP95Ms"] = f"{traffic.itl * 1000:.1f}"
    if traffic.ttft is not None:
        found["ttftP95Ms"] = f"{traffic.ttft * 1000:.0f}"
    if facts.line is not None:
        found["itlBaseMs"] = f"{facts.line.base * 1000:.3f}"
        found["itlSlopeMs"] = f"{facts.line.slope * 1000:.4f}"
        if not reachable(limits, facts.line):
            found["slo"] = "not reachable with any number of replicas"
    served = served_by(limits, view, facts)
    if served is not None:
        found["servedPerSecond"] = f"{served.each:.3f}"
    return found
