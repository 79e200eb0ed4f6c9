"""How many replicas run and in which layout, decided from the engines' metrics: pure decisions, thin effects beside."""
