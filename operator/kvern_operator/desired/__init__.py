"""Pure builders: a validated InferenceService -> the Kubernetes objects it leads to, as plain dicts."""
