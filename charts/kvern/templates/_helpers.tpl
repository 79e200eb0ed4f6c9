{{/* What all names begin with: the release's name, which holds the chart's as a rule. 40 characters leave room. */}}
{{- define "kvern.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Name of the Deployment, its Service, its Lease, and the beginning of its roles' names. */}}
{{- define "kvern.operator" -}}
{{ include "kvern.fullname" . }}-operator
{{- end }}

{{- define "kvern.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "kvern.operator" .) }}
{{- else }}
{{- required "serviceAccount.name: name the ServiceAccount to use, since serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvern.keySecret" -}}
{{ .Values.operatorKey.existingSecret | default (printf "%s-key" (include "kvern.operator" .)) }}
{{- end }}

{{/*
What tells the operator's pods from all others. Never changes: a Deployment's selector cannot. Name and component are also
what the NetworkPolicies of services know the operator by.
*/}}
{{- define "kvern.selector" -}}
app.kubernetes.io/name: kvern
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Labels of objects that are no pods of the operator. */}}
{{- define "kvern.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: kvern
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvern
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels of the operator and of what stands around it. */}}
{{- define "kvern.operatorLabels" -}}
{{ include "kvern.labels" . }}
app.kubernetes.io/component: operator
{{- end }}

{{/* (dict "image" .Values.images.x "chart" .Chart): the image's full name. */}}
{{- define "kvern.image" -}}
{{- $image := .image }}
{{- if not $image.digest }}
{{- printf "%s:%s" $image.repository ($image.tag | default .chart.AppVersion) }}
{{- else if $image.tag }}
{{- printf "%s:%s@%s" $image.repository $image.tag $image.digest }}
{{- else }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- end }}
{{- end }}

{{/* As Pod Security's profile `restricted` asks, and a root file system that nobody can write. */}}
{{- define "kvern.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- define "kvern.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/*
Whether the operator may make PodMonitors for services. In a namespaced install only where the cluster knows them already:
the admin of a namespace can rarely grant it.
*/}}
{{- define "kvern.podMonitors" -}}
{{- $known := .Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor" }}
{{- ternary "true" "false" (and .Values.podMonitor.create (or $known (empty .Values.watchNamespaces))) }}
{{- end }}

{{/* What the operator reads at start. Everything it can be told is here. */}}
{{- define "kvern.environment" -}}
- name: KVERN_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: KVERN_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: KVERN_LEASE_NAME
  value: {{ include "kvern.operator" . }}
- name: KVERN_WATCH_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: KVERN_OPERATOR_IMAGE
  value: {{ include "kvern.image" (dict "image" .Values.images.operator "chart" .Chart) }}
- name: KVERN_ENGINE_IMAGE
  value: {{ include "kvern.image" (dict "image" .Values.images.engine "chart" .Chart) }}
- name: KVERN_IMAGE_PULL_POLICY
  value: {{ .Values.images.pullPolicy }}
- name: KVERN_IMAGE_PULL_SECRETS
  value: {{ join "," .Values.images.pullSecrets | quote }}
- name: KVERN_OPERATOR_KEY_FILE
  value: /etc/kvern/operator-key/key
- name: KVERN_CLUSTER_DOMAIN
  value: {{ .Values.clusterDomain }}
- name: KVERN_RESYNC_SECONDS
  value: {{ .Values.resyncSeconds | quote }}
- name: KVERN_POD_MONITORS
  value: {{ include "kvern.podMonitors" . | quote }}
- name: KVERN_LOG_FORMAT
  value: {{ .Values.logging.format }}
- name: KVERN_LOG_LEVEL
  value: {{ .Values.logging.level }}
{{- end }}

{{/* Which value is to be set instead of each variable of the operator. */}}
{{- define "kvern.ownVariables" -}}
KVERN_LEASE_NAME: fullnameOverride
KVERN_WATCH_NAMESPACES: watchNamespaces
KVERN_OPERATOR_IMAGE: images.operator
KVERN_ENGINE_IMAGE: images.engine
KVERN_IMAGE_PULL_POLICY: images.pullPolicy
KVERN_IMAGE_PULL_SECRETS: images.pullSecrets
KVERN_OPERATOR_KEY_FILE: operatorKey.existingSecret
KVERN_CLUSTER_DOMAIN: clusterDomain
KVERN_RESYNC_SECONDS: resyncSeconds
KVERN_POD_MONITORS: podMonitor.create
KVERN_LOG_FORMAT: logging.format
KVERN_LOG_LEVEL: logging.level
{{- end }}

{{/* Refuses an extraEnv that sets one variable twice: which of the two counts would be chance. */}}
{{- define "kvern.checkExtraEnv" -}}
{{- $own := include "kvern.ownVariables" . | fromYaml }}
{{- $seen := dict }}
{{- range $i, $env := .Values.extraEnv }}
{{- if hasKey $own $env.name }}
{{- fail (printf "extraEnv[%d].name: %s is set by the value %s; use that" $i $env.name (get $own $env.name)) }}
{{- else if has $env.name (list "KVERN_NAMESPACE" "KVERN_POD_NAME") }}
{{- fail (printf "extraEnv[%d].name: %s comes from the pod itself; leave it out" $i $env.name) }}
{{- else if hasKey $seen $env.name }}
{{- fail (printf "extraEnv[%d].name: %s is there twice; keep one" $i $env.name) }}
{{- end }}
{{- $_ := set $seen $env.name true }}
{{- end }}
{{- end }}

{{/* Refuses labels that the chart sets itself: one of the two would be lost, and a selector with it. */}}
{{- define "kvern.checkLabels" -}}
{{- $given := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "podMonitor.labels" .Values.podMonitor.labels }}
{{- range $value, $labels := $given }}
{{- range $label, $_ := $labels }}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|version|component|part-of|managed-by)|helm[.]sh/.*)$" $label }}
{{- fail (printf "%s: the label %s is set by the chart; choose another" $value $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
