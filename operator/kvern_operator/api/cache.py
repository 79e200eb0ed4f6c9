"""spec.cache: the claim that keeps models. Part of the resource (see types.py)."""

from typing import ClassVar, Literal

from kvern_operator.api.base import KvernModel, ObjectName, Quantity, Rule, field


class CacheClaim(KvernModel):
    """A PersistentVolumeClaim that the operator creates."""

    size: Quantity = field(..., 'Size, such as "100Gi".')
    storage_class_name: ObjectName | None = field(None, "Default: the cluster's.")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"] = field("ReadWriteMany", "Access mode.")


class Cache(KvernModel):
    """Where a model is kept between starts."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "claimName",
            "has(self.claimName) != has(self.pvc)",
            "give one cache source: claimName (a claim that exists) or pvc (one that the operator creates)",
            lambda c: (c.claim_name is None) != (c.pvc is None),
        ),
    )

    claim_name: ObjectName | None = field(None, "A claim that exists.")
    pvc: CacheClaim | None = field(None, "A claim that the operator creates.")
    reclaim_policy: Literal["Retain", "Delete"] = field(
        "Retain",
        "What happens to pvc when the service is deleted. Models in a claim go when another one needs their room: "
        "those that nobody uses, the least recently used first.",
    )
