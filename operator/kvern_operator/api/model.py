"""spec.model: what is served, and the Secret that it and the router may refer to. Part of the resource."""

import re
from typing import ClassVar

from kvern_operator.api.base import KvernModel, ObjectName, Rule, ShortText, Text, field
from kvern_operator.api.patterns import BUILTIN_URIS, ENDPOINT_PATTERN, URI_PATTERN


class SecretRef(KvernModel):
    """A Secret of the service's own namespace."""

    name: ObjectName = field(..., "Name of the Secret.")


class Adapter(KvernModel):
    """A LoRA adapter."""

    name: ShortText = field(..., "Name clients ask for in the field `model`.")
    uri: Text = field(..., "Where the adapter is, in the forms of model.uri.", pattern=URI_PATTERN)


class Model(KvernModel):
    """What is served."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "revision",
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "revision is a branch, tag or commit of an hf:// model; leave it out for others",
            lambda m: m.revision is None or m.uri.startswith("hf://"),
            ("uri",),
        ),
        Rule(
            "uri",
            f"!self.uri.startsWith('builtin://') || self.uri in {list(BUILTIN_URIS)!r}",
            f"the engine has {' and '.join(BUILTIN_URIS)}, and no other model built in",
            lambda m: not m.uri.startswith("builtin://") or m.uri in BUILTIN_URIS,
            ("uri",),
        ),
        Rule(
            "uri",
            "!self.uri.startsWith('pvc://') || !('..' in self.uri.split('/'))",
            "a path in a claim must not lead out of it: leave out ..",
            lambda m: not m.uri.startswith("pvc://") or ".." not in m.uri.split("/"),
            ("uri",),
        ),
        Rule(
            "endpoint",
            "!has(self.endpoint) || self.uri.startsWith('hf://') || self.uri.startsWith('s3://')",
            "endpoint is the server of an hf:// or s3:// model; leave it out for others",
            lambda m: m.endpoint is None or m.uri.startswith(("hf://", "s3://")),
            ("uri",),
        ),
    )
    TRANSITION_RULES = (
        (
            "name",
            "has(self.name) == has(oldSelf.name) && (!has(self.name) || self.name == oldSelf.name)",
            "the name clients use is immutable; create another InferenceService",
        ),
    )

    uri: Text = field(
        ...,
        "hf://org/name, pvc://claim/path, s3://bucket/path, oci://registry/name:tag, builtin://smollm2-135m or "
        "builtin://tiny-kjv.",
        pattern=URI_PATTERN,
    )
    revision: ShortText | None = field(None, "Branch, tag or commit of an hf:// model.")
    name: ShortText | None = field(None, "Name clients use; immutable. Default: the last part of the uri.")
    secret_ref: SecretRef | None = field(
        None,
        "Secret with the credentials of the model's source: HF_TOKEN for hf://, AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY for s3://, a docker-registry Secret for oci://.",
    )
    endpoint: Text | None = field(
        None,
        "Server of an hf:// or s3:// model, such as https://minio.example:9000. Default: huggingface.co, or AWS.",
        pattern=ENDPOINT_PATTERN,
    )
    adapters: list[Adapter] = field(
        [],
        "LoRA adapters served beside the model.",
        max_length=64,
        extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    @property
    def served_name(self) -> str:
        """The name clients use."""
        if self.name is not None:
            return self.name
        scheme, _, rest = self.uri.partition("://")
        last = rest.rstrip("/").rpartition("/")[2]
        if scheme in ("hf", "s3") and last.endswith(".gguf"):
            return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", last)
        if scheme == "oci":
            return re.split("[:@]", last)[0]
        return rest.rstrip("/") if scheme == "hf" else last
