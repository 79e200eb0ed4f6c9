"""Kvern's operator: the InferenceService resource, its pure reconcile, and the builders of what it leads to.

Knows nothing of the engine: the two meet at HTTP, at the resource and at the generated list of engine flags.
"""

__version__ = "0.1.0"
