"""Patterns of the resource's text fields, each with what is right in words.

The schema has both (the API server prints a pattern as it stands, and the words as a rule's message), and so have the
messages of the loader. RE2 syntax, which Python and ECMA share.
"""

MAX_NAME = 40  # children add up to 12 characters, and a StatefulSet's name may have 52
DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

# Kubernetes' API conventions keep floats out of specs; a fraction is a string with at most four decimals.
FRACTION_PATTERN = r"^(0?\.[0-9]{0,3}[1-9]0{0,3}|1|1\.0{1,4})$"
QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]+)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
PERCENT_PATTERN = r"^(0|[1-9][0-9]?|100)%$"

BUILTIN_URIS = ("builtin://smollm2-135m", "builtin://tiny-kjv")
URI_PATTERN = r"^((hf|s3|oci)://[^/\s]+/\S+|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/\S+|builtin://[a-z0-9][a-z0-9._-]*)$"

ENDPOINT_PATTERN = r"^https?://[^/\s]+(/\S*)?$"

RIGHT = {
    DNS_LABEL: f"a name of a-z, 0-9 and dashes, a letter first, at most {MAX_NAME} characters",
    DNS_SUBDOMAIN: "an object's name: a-z, 0-9, dashes and dots",
    FRACTION_PATTERN: 'a decimal above 0 and at most 1 in quotes, such as "0.80"',
    QUANTITY_PATTERN: "a number and a unit, such as 500m, 2, 512Mi or 4Gi",
    PERCENT_PATTERN: 'a count or a percentage, such as 1 or "25%"',
    URI_PATTERN: "one of hf://org/name, pvc://claim/path, s3://bucket/path, oci://registry/name:tag, "
    "builtin://smollm2-135m, builtin://tiny-kjv",
    ENDPOINT_PATTERN: "a URL such as https://minio.example:9000",
}
