"""`kvern validate FILE...`: every error of every file, or what each file holds."""

import sys
from collections.abc import Sequence

from kvern_operator.api.load import ManifestError, load_file
from kvern_operator.reconcile import not_acted_upon


def validate(files: Sequence[str]) -> int:
    """0 where all are valid, 1 where one is not."""
    failed = False
    for file in files:
        try:
            service = load_file(file)
        except ManifestError as error:
            failed = True
            print(error, file=sys.stderr)
            continue
        spec = service.spec
        print(f"{file}: valid: {service.metadata.name} serves {spec.model.served_name}, replicas {spec.replicas}")
        for line in not_acted_upon(spec):
            print(f"{file}: note: {line}")
    return 1 if failed else 0
