"""The InferenceService resource: models, schema, loading. Nothing here reads a cluster or a clock."""
