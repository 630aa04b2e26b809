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

{{- define "quintet.labels" -}}
{{ include "quintet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
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

{{/* The most pods there may be at once. */}}
{{- define "quintet.mostPods" -}}
{{- ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") -}}
{{- end -}}
