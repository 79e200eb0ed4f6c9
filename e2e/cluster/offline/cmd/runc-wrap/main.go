// runc-wrap stands in front of runc where the machine's own capability bounding set is incomplete (a container or a
// sandbox that lacks CAP_SYS_RESOURCE, say). runc fails as a whole when asked for a capability that cannot be had, so
// those are taken out of the container's or the exec's sets first. Where nothing is missing it changes nothing.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// In the order of their bits.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE
AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

func missing() map[string]bool {
	names := map[string]bool{}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return names
	}
	for _, line := range strings.Split(string(status), "\n") {
		text, found := strings.CutPrefix(line, "CapBnd:")
		if !found {
			continue
		}
		bits, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
		if err != nil {
			return names
		}
		for i, name := range capabilities {
			if bits&(1<<i) == 0 {
				names["CAP_"+name] = true
			}
		}
	}
	return names
}

// withoutMissing rewrites the JSON document in file: at path there is an object of capability lists.
func withoutMissing(file string, path ...string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var document map[string]any
	if err := json.Unmarshal(text, &document); err != nil {
		return err
	}
	sets := document
	for _, key := range path {
		next, ok := sets[key].(map[string]any)
		if !ok {
			return nil
		}
		sets = next
	}
	gone := missing()
	for set, value := range sets {
		list, ok := value.([]any)
		if !ok {
			continue
		}
		kept := []any{}
		for _, item := range list {
			if name, _ := item.(string); !gone[name] {
				kept = append(kept, item)
			}
		}
		sets[set] = kept
	}
	out, err := json.Marshal(document)
	if err != nil {
		return err
	}
	return os.WriteFile(file, out, 0o600)
}

// option returns the value of `--name value` or `--name=value` at args[i].
func option(args []string, i int, name string) string {
	if args[i] == name && i+1 < len(args) {
		return args[i+1]
	}
	value, _ := strings.CutPrefix(args[i], name+"=")
	if value == args[i] {
		return ""
	}
	return value
}

func main() {
	args := os.Args
	for i := range args {
		var err error
		if bundle := option(args, i, "--bundle"); bundle != "" {
			err = withoutMissing(filepath.Join(bundle, "config.json"), "process", "capabilities")
		}
		if process := option(args, i, "--process"); process != "" {
			err = withoutMissing(process, "capabilities")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "runc-wrap:", err)
			os.Exit(1)
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		runc = "/usr/sbin/runc"
	}
	args[0] = runc
	err = syscall.Exec(runc, args, os.Environ())
	fmt.Fprintln(os.Stderr, "runc-wrap:", runc, err)
	os.Exit(127)
}
