"""Local mode: the executor behind `kvern up`. Pods of the planned objects run as processes of this machine.

It imitates the small part of a kubelet that the objects need: processes, probes, back-off, configuration as files. It
decides nothing about replicas: `kvern_operator.reconcile` does.
"""
