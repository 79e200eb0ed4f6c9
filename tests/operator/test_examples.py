"""Every file in examples/: valid, with every field acted upon, and leading to pods."""

from pathlib import Path

import pytest
import yaml
from fake_cluster import FakeCluster

from kvern_operator.api.load import load_file
from kvern_operator.desired.engine import pod_template
from kvern_operator.reconcile import not_acted_upon

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.rglob("*.yaml"))
SERVICES = [file for file in FILES if yaml.safe_load(file.read_text())["kind"] == "InferenceService"]


@pytest.mark.parametrize("file", SERVICES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_an_example_is_valid_and_leads_to_a_service_that_answers(file):
    service = load_file(file)
    assert not_acted_upon(service.spec) == []
    cluster = FakeCluster()
    cluster.settle(service)
    assert cluster.status.condition("Ready").status == "True"


def test_the_tensor_parallel_example_has_two_ranks_in_one_pod():
    service = load_file(FOLDER / "tiny-kjv-tensor-parallel.yaml")
    cluster = FakeCluster()
    cluster.settle(service)
    assert cluster.objects["ConfigMap", "tiny-kjv-tp2-r0-layout"]["data"]["KVERN_TENSOR_PARALLEL_SIZE"] == "2"
    container = pod_template(service, "tiny-kjv-tp2-r0", {}, cluster.settings)["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "--device" not in container["args"], "auto: the CPU where the GPUs are fake"


def test_the_autoscaler_scales_the_service_beside_it():
    hpa = yaml.safe_load((FOLDER / "hpa" / "hpa.yaml").read_text())
    service = load_file(FOLDER / "hpa" / "inferenceservice.yaml")
    target = hpa["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        service.api_version,
        service.kind,
        service.metadata.name,
    )
    assert service.spec.autoscaling.mode == "External"
    assert service.spec.resources.cpu is not None, "utilization is a share of the request"
    document = yaml.safe_load((FOLDER / "hpa" / "inferenceservice.yaml").read_text())
    assert "replicas" not in document["spec"], "applied again, it would fight with the autoscaler"


def test_all_examples_are_services_or_go_with_one():
    others = {file.relative_to(FOLDER) for file in FILES} - {file.relative_to(FOLDER) for file in SERVICES}
    assert others == {Path("hpa/hpa.yaml")}
