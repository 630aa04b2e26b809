{{/* Name of every object: the release's, with the chart's unless it is in there already. */}}
{{- define "quintet.name" -}}
{{- $name := ternary .Release.Name (printf "%s-quintet" .Release.Name) (contains "quintet" .Release.Name) -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects the pods, and never changes in the life of a release. */}}
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

{{/* What selects the pods that compute prompts for others. */}}
{{- define "quintet.prefillSelector" -}}
app.kubernetes.io/name: quintet-prefill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects the pods that compute for the first of their group. */}}
{{- define "quintet.workerSelector" -}}
app.kubernetes.io/name: quintet-worker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects servers of both kinds, where there are two. */}}
{{- define "quintet.anyServer" -}}
app.kubernetes.io/component: server
{{- end -}}

{{/* What selects the router's pods. */}}
{{- define "quintet.routerSelector" -}}
app.kubernetes.io/name: quintet-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Rights of a pod, and of its container. */}}
{{- define "quintet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# A volume of many weights is not walked again at each start.
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

{{/* Name of the claim behind /cache; empty for a folder of the pod. */}}
{{- define "quintet.claim" -}}
{{- if .Values.cache.existingClaim -}}
{{- .Values.cache.existingClaim -}}
{{- else if .Values.cache.create -}}
{{- include "quintet.name" . }}-cache
{{- end -}}
{{- end -}}

{{/* The most servers there may be at once. */}}
{{- define "quintet.mostPods" -}}
{{- $servers := ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") -}}
{{- add .Values.prefill.replicas (mul $servers .Values.hosts.size) -}}
{{- end -}}

{{/* What an autoscaler scales: servers that are a pod each, or groups of pods. */}}
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

{{/* Rules of a NetworkPolicy: where names are known, where models are fetched, and where KV is, of up to 64 engines. */}}
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
