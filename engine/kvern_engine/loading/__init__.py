"""Finding, describing and reading model files. Only `weights.py` imports torch."""
