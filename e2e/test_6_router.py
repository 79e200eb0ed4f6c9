"""The router on a cluster: keys from a Secret that is rotated, limits, and replicas that it finds by itself."""

import json
import time
from collections.abc import Callable, Iterator

import kit
import pytest
from kit import Client, Service, eventually, kubectl

Make = Callable[..., Service]
# Prints status, headers and body of one request; the key is the second argument.
ASK = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"model": "tiny-kjv", "prompt": "In the beginning", "max_tokens": 4}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}
request = urllib.request.Request(sys.argv[1] + "/completions", body, headers)
try:
    answer = urllib.request.urlopen(request, timeout=120)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.loads(answer.read())]))
"""


def ask(client: Client, url: str, key: str) -> tuple[int, dict[str, str], kit.Object]:
    status, headers, body = json.loads(client.exec("python3", "-c", ASK, url, key))
    return status, headers, body


def keys(namespace: str, text: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"keys": text}}
    kubectl("-n", namespace, "apply", "--server-side", "-f", "-", stdin=json.dumps(secret))


def test_keys_are_rotated_and_limits_changed_without_a_restart(service: Make, client: Client, namespace: str) -> None:
    keys(namespace, "team-a: sk-old\nteam-b: sk-b\n")
    spec = {"replicas": 2, "apiKeysSecretRef": {"name": "keys"}, "limits": {"requestsPerMinute": 3}}
    one = service("tiny", router=spec)
    one.wait_ready()
    routers = {pod["metadata"]["uid"] for pod in one.pods("router")}
    assert ask(client, one.url, "sk-none")[0] == 401
    answers = [ask(client, one.url, "sk-old") for _ in range(6)]
    refused = [(headers, body["error"]) for status, headers, body in answers if status == 429]
    assert 2 <= len(refused) <= 3, "two routers, one limit (and the seconds that these requests take)"
    headers, error = refused[0]
    assert error["message"].startswith("Rate limit reached for tenant team-a: 3 requests a minute"), error
    assert (error["type"], headers["x-ratelimit-limit-requests"]) == ("requests", "3")
    assert 0 < int(headers["retry-after"]) <= 20 and headers["x-ratelimit-reset-requests"]
    assert ask(client, one.url, "sk-b")[0] == 200

    keys(namespace, "team-a: sk-old\nteam-a: sk-new\nteam-b: sk-b\n")
    spec["limits"] = {"requestsPerMinute": 60_000}
    one.apply(kit.manifest("tiny", router=spec))
    # Both routers: a connection goes to either.
    eventually("the new key everywhere", lambda: {ask(client, one.url, "sk-new")[0] for _ in range(8)} == {200}, 150)
    assert {ask(client, one.url, "sk-old")[0] for _ in range(4)} == {200}
    keys(namespace, "team-a: sk-new\nteam-b: sk-b\n")
    eventually("the old key nowhere", lambda: {ask(client, one.url, "sk-old")[0] for _ in range(8)} == {401}, 150)
    assert {pod["metadata"]["uid"] for pod in one.pods("router")} == routers
    said = kubectl("-n", namespace, "logs", "-l", "app.kubernetes.io/component=router", "--tail=-1")
    assert '"tenant":"team-a"' in said and "sk-" not in said


@pytest.fixture
def no_operator() -> Iterator[Callable[[], None]]:
    """Takes the operator away until the end of the test."""
    scale = ("-n", kit.OPERATOR_NAMESPACE, "scale", kit.OPERATOR)
    replicas = kubectl("-n", kit.OPERATOR_NAMESPACE, "get", kit.OPERATOR, "-o", "jsonpath={.spec.replicas}")

    def away() -> None:
        kubectl(*scale, "--replicas=0")
        selector = "app.kubernetes.io/name=kvern,app.kubernetes.io/component=operator"
        eventually("no operator pod", lambda: not kit.items("pods", kit.OPERATOR_NAMESPACE, selector), 60)

    yield away
    kubectl(*scale, f"--replicas={replicas}")
    kubectl("-n", kit.OPERATOR_NAMESPACE, "rollout", "status", kit.OPERATOR, "--timeout=90s")


@pytest.mark.alone
def test_a_replaced_pod_is_found_without_an_operator(
    service: Make, client: Client, no_operator: Callable[[], None], measure: Callable[[str, float], None]
) -> None:
    """Its address is another one, and nobody writes the list of replicas: the router knows its name."""
    one = service("tiny")
    one.wait_ready()
    before = one.pods()[0]
    no_operator()
    kubectl("-n", one.namespace, "delete", "pod", before["metadata"]["name"], "--wait=false")
    eventually("another pod", lambda: one.pods()[0]["metadata"]["uid"] != before["metadata"]["uid"], 90)
    began = time.monotonic()
    answer = client.complete(one.url)  # held until the new one is ready
    assert answer["errors"] == 0 and answer["chunks"] > 0, answer
    measure("replaced pod, no operator: new pod object to first answer", time.monotonic() - began)
    assert one.pods()[0]["status"]["podIP"] != before["status"]["podIP"]
