{{/*
What the operator may do, a template a concern. The same rules go into ClusterRoles, or into Roles of the watched
namespaces. It lists and watches, and never needs `get`; server-side apply is `patch`, and `create` for what is not there
yet. tests/charts compare the rules with what the operator's code builds.
*/}}

{{/* The resource itself: read it, write its status. Its spec is the user's. */}}
{{- define "kvern.rules.resource" -}}
- apiGroups: [kvern.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [kvern.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# Children name their service as an owner that waits for them; where the API server asks for the right to do so
# (OpenShift does), this is it.
- apiGroups: [kvern.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
{{- end }}

{{/* What a service consists of. */}}
{{- define "kvern.rules.children" -}}
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [list, watch, create, patch, delete]
# The download of a model into its claim.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services, serviceaccounts]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
# Never deleted: a claim holds data.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, watch, create, patch]
{{- end }}

{{/* A PodMonitor a service. */}}
{{- define "kvern.rules.monitors" -}}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [list, watch, create, patch, delete]
{{- end }}

{{/* Why a service does not start: its pods, and what controllers say of it. Pods are made by StatefulSets. */}}
{{- define "kvern.rules.causes" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end }}

{{/*
A router reads its replicas from a ConfigMap, which the kubelet mounts anew once a minute, or at once where the pod
changes: an annotation does that. Rights have no finer grain than the pod.
*/}}
{{- define "kvern.rules.routers" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [patch]
{{- end }}

{{/* A service's admin token is derived, not remembered: no Secret is ever read. */}}
{{- define "kvern.rules.secrets" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end }}

{{/* What the operator did and why, for `kubectl describe`. */}}
{{- define "kvern.rules.events" -}}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Whether the resource is there, or was replaced. Cluster-wide installs only: a definition is in no namespace. */}}
{{- define "kvern.rules.definitions" -}}
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}

{{/*
What nodes have left, for a rollout to choose between a surge and a swap: read while one is under way, never watched. Nodes
are in no namespace: without this right a rollout tries a surge, and swaps where its pod finds no node.
*/}}
{{- define "kvern.rules.nodes" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
{{- end }}
