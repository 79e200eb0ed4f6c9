"""Manifests: every message that a person can meet, word for word."""

# ruff: noqa: E501 - messages are tested as they are printed, unbroken

import pytest

from kvern_operator.api.base import parse_quantity, resolve_count
from kvern_operator.api.load import ManifestError, load_file, load_text
from kvern_operator.api.types import immutable_changes

HEAD = "apiVersion: kvern.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a}\n"


def manifest(spec: str) -> str:
    return f"{HEAD}spec:\n  model: {{uri: 'builtin://smollm2-135m'}}\n  {spec}\n"


def errors(text: str) -> list[str]:
    with pytest.raises(ManifestError) as found:
        load_text(text, "f.yaml")
    return str(found.value).splitlines()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("replica: 2", "spec.replica: unknown field; did you mean replicas?"),
        ("max_replicas: 2", "spec.max_replicas: unknown field here; did you mean spec.autoscaling.maxReplicas?"),
        ("minReplicas: 2", "spec.minReplicas: unknown field here; did you mean spec.autoscaling.minReplicas?"),
        ("engine: {max-model-len: 5}", "spec.engine.max-model-len: unknown field; did you mean maxModelLen?"),
        ("parallelism: {pipeline: {xyz: 1}}", "spec.parallelism.pipeline.xyz: unknown field; known are size"),
        ("replicas: -1", "spec.replicas: -1 must be at least 0"),
        ("replicas: 20000", "spec.replicas: 20000 must be at most 10000"),
        ('replicas: "2"', 'spec.replicas: "2" is text; write it without quotes: 2'),
        ("replicas: 2.5", "spec.replicas: 2.5 must be a whole number"),
        ("replicas: two", 'spec.replicas: "two" must be a whole number'),
        ("replicas:", "spec.replicas: is empty; it must be a whole number, or leave the field out"),
        ("suspend: 1", "spec.suspend: 1 must be true or false"),
        ("engine: 5", "spec.engine: 5 must be a map"),
        (
            "engine: {quantization: fp4}",
            'spec.engine.quantization: "fp4" must be one of fp8, fp8_per_tensor, fp8_per_channel',
        ),
        (
            "engine: {gpuMemoryUtilization: 0.9}",
            'spec.engine.gpuMemoryUtilization: 0.9 is a number; write it in quotes: "0.9"',
        ),
        (
            'engine: {gpuMemoryUtilization: "1.5"}',
            'spec.engine.gpuMemoryUtilization: "1.5" must be a decimal above 0 and at most 1 in quotes, such as "0.80"',
        ),
        ("engine: {image: true}", 'spec.engine.image: true is a boolean; write it in quotes: "true"'),
        (
            "resources: {cpu: 2x}",
            'spec.resources.cpu: "2x" is not a quantity; write a number and a unit, such as 500m, 2, 512Mi or 4Gi',
        ),
        (
            "resources: {memory: -3}",
            "spec.resources.memory: -3 is not a quantity; write a number and a unit, such as 500m, 2, 512Mi or 4Gi",
        ),
        ("resources: {tolerations: {a: 1}}", "spec.resources.tolerations: a map must be a list"),
        ("resources: {gpusPerPod: 100}", "spec.resources.gpusPerPod: 100 must be at most 64"),
        (
            "resources: {gpusPerPod: 4}, parallelism: {tensor: {size: 3}}",
            None,
        ),
        ("autoscaling: {mode: Of}", 'spec.autoscaling.mode: "Of" must be one of Off, Recommend, Internal, External'),
        (
            "autoscaling: {minReplicas: 5, maxReplicas: 3}",
            "spec.autoscaling.minReplicas: minReplicas must be at most maxReplicas (minReplicas 5, maxReplicas 3)",
        ),
        (
            "autoscaling: {mode: Internal}",
            'spec.autoscaling.maxReplicas: maxReplicas is needed in modes Internal and Recommend (mode "Internal")',
        ),
        (
            "parallelism: {tensor: {size: 1, min: 2, max: 4}}",
            "spec.parallelism.tensor.size: size must be within min..max (size 1, min 2, max 4)",
        ),
        (
            "parallelism: {tensor: {min: 4, max: 2}}",
            "spec.parallelism.tensor.min: min must be at most max (min 4, max 2)",
        ),
        (
            'rollout: {maxSurge: 0, maxUnavailable: "0%"}',
            'spec.rollout.maxUnavailable: maxSurge and maxUnavailable must not both be 0 (maxSurge 0, maxUnavailable "0%")',
        ),
        (
            "rollout: {maxSurge: lots}",
            'spec.rollout.maxSurge: "lots" is neither a count nor a percentage; write 1 or "25%"',
        ),
        (
            "cache: {reclaimPolicy: Retain}",
            "spec.cache.claimName: give one cache source: claimName (a claim that exists) or pvc (one that the operator creates)",
        ),
        ("cache: {pvc: {}}", "spec.cache.pvc.size: is missing"),
        ("cache: {claimName: A_b}", 'spec.cache.claimName: "A_b" must be an object\'s name: a-z, 0-9, dashes and dots'),
        ("engine: {image: ''}", "spec.engine.image: must not be empty"),
        ("engine: {args: {max-model-len: 5}}", "spec.engine.args.max-model-len: set spec.engine.maxModelLen instead"),
        ("engine: {args: {port: 5}}", "spec.engine.args.port: the operator decides this flag; leave it out"),
        ("engine: {args: {block-siz: 5}}", "spec.engine.args.block-siz: unknown engine flag; did you mean block-size?"),
        (
            "engine: {args: {block_size: 5}}",
            "spec.engine.args.block_size: unknown engine flag; did you mean block-size?",
        ),
        (
            "engine: {args: {no-enable-prefix-caching: x}}",
            'spec.engine.args.no-enable-prefix-caching: unknown engine flag; write enable-prefix-caching: "false"',
        ),
        ("engine: {args: {zzz: 5}}", "spec.engine.args.zzz: unknown engine flag; kvern serve --help lists all"),
        (
            "engine: {args: {max_model_len: 5}}",
            "spec.engine.args.max_model_len: unknown engine flag; max-model-len is set by spec.engine.maxModelLen",
        ),
        (
            "engine: {args: {block-size: 900}}",
            "spec.engine.args.block-size: 900 is not allowed; it must be a whole number at least 1 and at most 256",
        ),
        (
            "engine: {args: {device: gpu}}",
            "spec.engine.args.device: gpu is not allowed; it must be one of auto, cuda, cpu, sim",
        ),
        (
            "engine: {args: {enforce-eager: true}}",
            'spec.engine.args.enforce-eager: true is a boolean; write it in quotes: "true"',
        ),
        (
            'engine: {args: {enforce-eager: "maybe"}}',
            'spec.engine.args.enforce-eager: maybe is not allowed; it must be "true" or "false"',
        ),
        (
            "engine: {args: {sim-speed: 0.5}}",
            'spec.engine.args.sim-speed: 0.5 is a decimal number; write it in quotes: "0.5"',
        ),
        ("engine: {args: {tokenizer: [a]}}", "spec.engine.args.tokenizer: must be text or a whole number"),
        (
            "resources: {gpusPerPod: 1}, engine: {args: {data-parallel-size: 2}}",
            None,
        ),
    ],
)
def test_one_mistake_gives_one_line_with_place_value_and_what_is_right(spec, message):
    if message is None:  # several keys of the spec on one line: written out
        spec = spec.replace("}, ", "}\n  ")
        message = {
            "parallelism": "spec.parallelism.tensor.size: tensor size x pipeline size must divide gpusPerPod x nodesPerReplica "
            "(resources.gpusPerPod 4, resources.nodesPerReplica 1, parallelism.pipeline.size 1)",
            "engine": "spec.engine.args: data-parallel-size follows from gpusPerPod / (tensor x pipeline); it may be given for "
            "CPU pods only (resources.gpusPerPod 1)",
        }[spec.splitlines()[1].partition(":")[0].strip()]
        assert errors(manifest(spec)) == [f"f.yaml:7: {message}"]
        return
    assert errors(manifest(spec)) == [f"f.yaml:6: {message}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: is empty; it should hold one InferenceService (kvern.dev/v1alpha1)"),
        ("a: [", "f.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: 1\n\tb: 2", "f.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        (
            "a: 1\n---\nb: 2\n",
            "f.yaml:3: 2 documents; a file holds one InferenceService: put the others into files of their own",
        ),
        ("- 1", "f.yaml:1: holds a list of 1; it should hold one InferenceService"),
        (f"{HEAD}kind: x\nspec: {{}}", "f.yaml:4: kind: is given twice (first on line 2)"),
        (HEAD, "f.yaml:1: spec: is missing"),
        (f"{HEAD}spec: {{}}", "f.yaml:4: spec.model: is missing"),
        (f"{HEAD}spec: {{model: {{}}}}", "f.yaml:4: spec.model.uri: is missing"),
        (
            f"{HEAD}spec: {{model: {{uri: 'builtin://tiny-kjv'}}}}\nstats: {{}}",
            "f.yaml:5: stats: unknown field; did you mean status?",
        ),
        (
            f"{HEAD}spec: {{model: {{uri: foo}}}}",
            'f.yaml:4: spec.model.uri: "foo" must be one of hf://org/name, pvc://claim/path, s3://bucket/path, '
            "oci://registry/name:tag, builtin://smollm2-135m, builtin://tiny-kjv",
        ),
        (
            f"{HEAD}spec: {{model: {{uri: 'hf://a/b', revision: 2024-01-01}}}}",
            'f.yaml:4: spec.model.revision: 2024-01-01 is a date; write it in quotes: "2024-01-01"',
        ),
        (
            f"{HEAD}spec: {{model: {{uri: 'builtin://tiny-kjv', revision: a}}}}",
            "f.yaml:4: spec.model.revision: revision is a branch, tag or commit of an hf:// model; leave it out for others "
            '(uri "builtin://tiny-kjv")',
        ),
        (
            HEAD.replace("{name: a}", "{name: Big_Name}") + "spec: {model: {uri: 'builtin://tiny-kjv'}}",
            'f.yaml:3: metadata.name: "Big_Name" must be a name of a-z, 0-9 and dashes, a letter first, at most 40 characters',
        ),
        (
            HEAD.replace("{name: a}", "{name: " + "a" * 41 + "}") + "spec: {model: {uri: 'builtin://tiny-kjv'}}",
            "f.yaml:3: metadata.name: has 41 characters; at most 40 are allowed",
        ),
    ],
)
def test_what_is_wrong_with_the_document(text, message):
    assert errors(text) == [message]


def test_wrong_kind_and_version_are_named_together():
    assert errors("apiVersion: apps/v1\nkind: Deployment\nspec: {x: 1}") == [
        'f.yaml:1: apiVersion: "apps/v1" must be kvern.dev/v1alpha1',
        'f.yaml:2: kind: "Deployment" must be InferenceService',
    ]
    assert errors("spec: {}") == [
        "f.yaml:1: apiVersion: is missing; write apiVersion: kvern.dev/v1alpha1",
        "f.yaml:1: kind: is missing; write kind: InferenceService",
    ]


def test_all_errors_come_at_once_in_the_order_of_the_file():
    text = manifest("replicas: -1\n  replica: 1\n  router: {mode: x, replicas: 0}")
    assert [line.partition(": ")[0] for line in errors(text)] == ["f.yaml:6", "f.yaml:7", "f.yaml:8", "f.yaml:8"]


def test_files_that_cannot_be_read(tmp_path):
    def message(path) -> str:
        with pytest.raises(ManifestError) as found:
            load_file(path)
        return str(found.value)

    assert message(tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: no such file"
    assert message(tmp_path) == f"{tmp_path}: is a folder; name one YAML file in it"
    (tmp_path / "b").write_bytes(b"a: \xff")
    assert message(tmp_path / "b") == f"{tmp_path / 'b'}: is not UTF-8 text (byte 3)"


def test_a_full_manifest_keeps_what_it_says():
    service = load_text(
        manifest(
            "replicas: 3\n  resources: {cpu: 2, memory: 4Gi, gpusPerPod: 8}\n"
            "  parallelism: {tensor: {mode: Auto, size: 2, min: 1, max: 8}}\n"
            '  rollout: {maxSurge: "25%", maxUnavailable: 1}\n  engine: {args: {block-size: 32, enforce-eager: "true"}}\n'
            "  overrides: {podTemplate: {spec: {anything: [1, {goes: here}]}}}"
        )
    )
    spec = service.spec
    assert (spec.replicas, spec.resources.cpu, spec.parallelism.tensor.size) == (3, 2, 2)
    assert spec.overrides.pod_template == {"spec": {"anything": [1, {"goes": "here"}]}}
    assert load_text(manifest("replicas: 3")).spec.model.served_name == "smollm2-135m"
    assert service.metadata.namespace == "default"


def test_the_name_clients_use_cannot_be_changed():
    old, new = (load_text(HEAD + f"spec: {{model: {{uri: 'builtin://tiny-kjv', name: {n}}}}}").spec for n in ("a", "b"))
    assert immutable_changes(old, old) == []
    assert immutable_changes(old, new) == [
        "spec.model.name: 'b' (was 'a'): the name clients use is immutable; create another InferenceService"
    ]


def test_quantities_and_counts():
    assert [int(parse_quantity(q) * 1000) for q in ("500m", "2", 2, "1Ki", "0.5", "1G")] == [
        500,
        2000,
        2000,
        1024000,
        500,
        10**12,
    ]
    assert [resolve_count("25%", 5, round_up=up) for up in (True, False)] == [2, 1]
    assert resolve_count(3, 5, round_up=True) == 3
