"""Kvern's router: the small proxy in front of the replicas of an InferenceService.

It balances, holds requests while no replica is ready, retries what has not begun to stream, and drains. It imports
neither the engine nor the operator: it meets the first over HTTP and the second in a file of replicas.
"""
