"""`kvern up` as the server of `switch_h200.py`: the file changes, and the layout with it; streams see the router.

Where the project is not installed, its programs are small scripts in a folder of PATH.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

MANIFEST = """\
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {name: moves}
spec:
  model: {uri: "pvc://models/model", name: m}
  engine:
    maxModelLen: 8192
    maxNumSeqs: 256
    gpuMemoryUtilization: "0.9"
    args: {load-format: dummy, api-server-count: 4%s}
  resources: {gpusPerPod: 2}
  parallelism: {tensor: {size: %d}}
  rollout: {drainTimeoutSeconds: 10}
  overrides:
    podTemplate:
      spec:
        containers:
          - name: engine
            env:
              - {name: KVERN_GPU_LAYOUT_SWITCH, value: "1"}
"""
PROGRAMS = {"kvern": "kvern_cli.main", "kvern-router": "kvern_router.main"}


class UpServer:
    """As `switch_h200.Server`, for a model folder called `model` in `folder`."""

    def __init__(self, folder, device):
        self._folder, self._more = Path(folder), f", device: {device}" if device != "cuda" else ""
        bin_folder = self._folder / "bin"
        bin_folder.mkdir()
        for name, module in PROGRAMS.items():
            (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (bin_folder / name).chmod(0o755)
        self._file = self._folder / "service.yaml"
        self._write(1)
        environ = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        environ |= {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "XDG_STATE_HOME": str(self._folder)}
        command = ["kvern", "up", str(self._file), "--port", "0", "--claim", f"models={folder}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environ}
        )
        self.lines, began = [], time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()
        while not (found := re.search(r"URL: +(http\S+)/v1", "".join(list(self.lines)))):
            if self.process.poll() is not None:
                raise SystemExit(f"kvern up ended with status {self.process.returncode}")
            time.sleep(0.05)
        self.ready_after, self.url = time.monotonic() - began, found.group(1)
        state = json.loads((self._folder / "kvern" / "default_moves" / "state.json").read_text())
        log = next(Path(pod["log"]) for pod in state["pods"] if pod["component"] == "engine")
        self.admin = re.search(r"admin_url=(\S+)", log.read_text()).group(1)
        self._token = next((self._folder / "kvern" / "default_moves" / "volumes").glob("secret-*/token")).read_text()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            print(line, end="", flush=True)

    def _write(self, tensor):
        fresh = self._file.with_suffix(".new")
        fresh.write_text(MANIFEST % (self._more, tensor))
        fresh.replace(self._file)

    def layout(self):
        """What the pod says at GET /admin/layout."""
        asked = urllib.request.Request(f"{self.admin}/admin/layout", headers={"Authorization": f"Bearer {self._token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def switch(self, tensor):
        """Change the file and wait; the moment of the change and the record."""
        before = len(self.layout()["last"]), time.monotonic()
        self._write(tensor)
        while True:
            found = self.layout()
            if found["current"] == tensor and found["phase"] == "Stable" and len(found["last"]) > before[0]:
                return before[1], found["last"][0]
            if time.monotonic() > before[1] + 60:
                raise SystemExit(f"the file asks for {tensor}, and the pod has {found}")
            time.sleep(0.05)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
