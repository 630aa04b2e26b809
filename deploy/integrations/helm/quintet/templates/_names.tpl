{{/* Object name: the release name, plus the chart name unless contained in it. */}}
{{- define "quintet.name" -}}
{{- $name := ternary .Release.Name (printf "%s-quintet" .Release.Name) (contains "quintet" .Release.Name) -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Selector of pods; constant over the life of a release. */}}
{{- define "quintet.selector" -}}
app.kubernetes.io/name: quintet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quintet.serverSelector" -}}{{ include "quintet.selector" . }}{{- end -}}
{{- define "quintet.leaderSelector" -}}{{ include "quintet.selector" . }}{{- end -}}

{{- define "quintet.labels" -}}
{{ include "quintet.selector" . }}
{{ include "quintet.version" . }}
{{- end -}}

{{- define "quintet.version" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Selector of prefill pods. */}}
{{- define "quintet.prefillSelector" -}}
app.kubernetes.io/name: quintet-prefill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Selector of worker pods of multi-host groups. */}}
{{- define "quintet.workerSelector" -}}
app.kubernetes.io/name: quintet-worker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Selector of servers of all kinds. */}}
{{- define "quintet.anyServer" -}}
app.kubernetes.io/component: server
{{- end -}}

{{/* Selector of router pods. */}}
{{- define "quintet.routerSelector" -}}
app.kubernetes.io/name: quintet-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Security context of a pod and its container. */}}
{{- define "quintet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# Do not change the ownership of all files of the volume at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}
{{- define "quintet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Claim name of /cache; empty for an emptyDir volume. */}}
{{- define "quintet.claim" -}}
{{- if .Values.cache.existingClaim -}}
{{- .Values.cache.existingClaim -}}
{{- else if .Values.cache.create -}}
{{- include "quintet.name" . }}-cache
{{- end -}}
{{- end -}}

{{/* Maximum number of servers. */}}
{{- define "quintet.mostPods" -}}
{{- $servers := ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") -}}
{{- add .Values.prefill.replicas (mul $servers .Values.hosts.size) -}}
{{- end -}}

{{/* Scale target of autoscalers: the Deployment, or the LeaderWorkerSet. */}}
{{- define "quintet.scaled" -}}
{{- if gt (int .Values.hosts.size) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "quintet.name" . }}-hosts
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "quintet.name" . }}
{{- end -}}
{{- end -}}

{{/* NetworkPolicy egress rules: DNS, model downloads, and KV transfer of up to 64 engines. */}}
{{- define "quintet.toNames" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}
{{- define "quintet.toHub" -}}
{{ include "quintet.toNames" . }}
    - port: 443
      protocol: TCP
{{- end -}}
{{- define "quintet.kvPorts" -}}
- port: 5600
  endPort: 5663
  protocol: TCP
{{- end -}}
