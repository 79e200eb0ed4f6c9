"""What `helm test` runs, in the operator's image: is the operator healthy, and does the API server know the resource?

Uses the standard library only. Ends with 1 and one line a failure.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PATIENCE = 60  # seconds: after an upgrade the Service may still lead to the pod that goes


def fetch(url: str, **request: object) -> bytes:
    """The body of a GET; raises urllib.error.URLError or OSError."""
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if url.startswith("https") else None
    with urllib.request.urlopen(urllib.request.Request(url, **request), timeout=5, context=context) as answer:
        body: bytes = answer.read()
    return body


def operator_problem(base: str) -> str:
    """What is wrong with the operator's health; empty where nothing is."""
    for path in ("/healthz", "/readyz"):
        try:
            fetch(base + path)
        except urllib.error.HTTPError as error:
            return f"{base}{path} answers {error.code}: {error.read().decode(errors='replace').strip()[:500]}"
        except OSError as error:
            return f"{base}{path} does not answer: {error}"
    return ""


def resource_problem(server: str, token: str) -> str:
    """What is wrong with the resource; empty where the API server serves it with its status and scale."""
    url = f"{server}/apis/kvern.dev/v1alpha1"
    try:
        found = json.loads(fetch(url, headers={"Authorization": f"Bearer {token}"}))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return "the cluster does not know InferenceService: install the chart kvern-crds"
        return f"{url} answers {error.code}"
    except OSError as error:
        return f"{url} does not answer: {error}"
    wanted = {"inferenceservices", "inferenceservices/status", "inferenceservices/scale"}
    missing = sorted(wanted - {resource["name"] for resource in found["resources"]})
    return f"the API server does not serve {', '.join(missing)}: upgrade the chart kvern-crds" if missing else ""


def main() -> int:
    """Look until all is well or patience ends."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    deadline = time.monotonic() + PATIENCE
    while True:
        problems = [
            operator_problem(os.environ["OPERATOR_URL"]),
            resource_problem(server, (ACCOUNT / "token").read_text()),
        ]
        if not any(problems):
            sys.stdout.write("The operator is healthy, and the API server serves InferenceService.\n")
            return 0
        if time.monotonic() > deadline:
            sys.stdout.write("".join(f"{problem}\n" for problem in problems if problem))
            return 1
        time.sleep(2)


if __name__ == "__main__":
    raise SystemExit(main())
