"""What the tests of failures do below Kubernetes, on kind's nodes: signals to processes, static pods moved away, a node
without power. Everything goes through cluster/node.sh.
"""

import time

import kit
from kit import Object, eventually, kubectl, run

NODE = str(kit.ROOT / "e2e/cluster/node.sh")
MANIFESTS, AWAY = "/etc/kubernetes/manifests", "/etc/kubernetes/away"


def shell(node: str, script: str, timeout: float = 120) -> str:
    """What a script of the node's shell prints; raises CommandError."""
    return run(NODE, node, "bash", "-euo", "pipefail", "-c", script, timeout=timeout)


def names() -> list[str]:
    """All nodes."""
    return kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()


def control_plane() -> str:
    """The node of API server and etcd."""
    label = "node-role.kubernetes.io/control-plane"
    return kubectl("get", "nodes", "-l", label, "-o", "jsonpath={.items[0].metadata.name}")


def worker() -> str:
    """The other one."""
    return next(name for name in names() if name != control_plane())


def signal(pod: Object, container: str, number: int = 9, child: str = "") -> None:
    """Send a signal to a container's main process, or to its child whose command line contains `child`."""
    uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
    find_child = f"pid=$(pgrep -P $pid -f -- {child!r} | head -n 1)" if child else ":"
    shell(
        node,
        f"""
        id=$(crictl ps -q --state Running --label io.kubernetes.pod.uid={uid} --name '^{container}$')
        test -n "$id" || {{ echo 'no running container {container}' >&2; exit 1; }}
        pid=$(crictl inspect -o go-template --template '{{{{.info.pid}}}}' $id)
        {find_child}
        kill -{number} $pid""",
    )


def second_name(image: str, other: str) -> None:
    """Give an image another name on every node, as a registry would have a new tag of the same content."""
    for node in names():
        shell(node, f"ctr -n k8s.io images tag --force {_whole_name(image)} {_whole_name(other)}")


def _whole_name(image: str) -> str:
    """As containerd has it: with the registry."""
    return image if "." in image.partition("/")[0] else f"docker.io/{image}"


# ---------------------------------------------------------------- the control plane


def take_away(node: str, *static_pods: str) -> None:
    """Stop static pods by moving their manifests away; returns when they have ended."""
    moves = "; ".join(f"mv {MANIFESTS}/{name}.yaml {AWAY}/" for name in static_pods)
    ended = "; ".join(f"while pgrep -x {name[:15]} >/dev/null; do sleep 0.2; done" for name in static_pods)
    shell(node, f"mkdir -p {AWAY}; {moves}; {ended}", timeout=120)


def bring_back(node: str) -> None:
    """Start all that was taken away; returns when the API server is ready."""
    shell(node, f"! ls {AWAY}/*.yaml >/dev/null 2>&1 || mv {AWAY}/*.yaml {MANIFESTS}/")
    eventually("the API server is ready", lambda: kubectl("get", "--raw", "/readyz", timeout=10) == "ok", 120)


def api_server_away(seconds: float) -> None:
    """No API server for that long, from the moment it has ended."""
    node = control_plane()
    try:
        take_away(node, "kube-apiserver")
        time.sleep(seconds)
    finally:
        bring_back(node)


CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")


def back_up_etcd() -> None:
    """A copy of etcd's data folder, made while it is stopped."""
    node = control_plane()
    try:
        take_away(node, "kube-apiserver", "etcd")
        shell(node, "rm -rf /var/lib/etcd-backup; cp -a /var/lib/etcd /var/lib/etcd-backup")
    finally:
        bring_back(node)


def restore_etcd() -> None:
    """The copy takes the place of the data; whatever watches the API server is restarted, as Kubernetes' own
    instructions for a restore have it: all of the control plane, kubelets and kube-proxies. Kvern's operator is not."""
    node = control_plane()
    try:
        take_away(node, *CONTROL_PLANE)
        shell(node, "rm -rf /var/lib/etcd/member; cp -a /var/lib/etcd-backup/member /var/lib/etcd/")
    finally:
        bring_back(node)
    for name in names():
        # crictl stop: the kubelet starts it again.
        shell(name, "systemctl restart kubelet; crictl ps -q --name '^kube-proxy$' | xargs -r crictl stop >/dev/null")
