"""A small client of the Kubernetes API for the commands that look at a cluster: kubeconfig, HTTP, snapshots.

Standard library, yaml and httpx only: importing the official client takes longer than a whole `kvern status`.
"""
