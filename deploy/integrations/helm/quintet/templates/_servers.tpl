{{/* Deployment of servers: prefill servers, or all others. */}}
{{- define "quintet.servers" -}}
{{- $kind := .kind -}}
{{- $selector := printf "quintet.%sSelector" $kind -}}
{{- with .root -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "quintet.name" . }}{{ ternary "-prefill" "" (eq $kind "prefill") }}
  labels: {{- include "quintet.labels" . | nindent 4 }}
spec:
  {{- if eq $kind "prefill" }}
  replicas: {{ .Values.prefill.replicas }}
  {{- else if eq .Values.autoscaling.kind "none" }}
  replicas: {{ .Values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include $selector . | nindent 6 }}
  strategy: {{- toYaml .Values.strategy | nindent 4 }}
  # A start that downloads its model must not count as a failed rollout.
  progressDeadlineSeconds: {{ add .Values.startSeconds 60 }}
  template:
    {{- include "quintet.pod" (dict "root" . "kind" $kind) | nindent 4 }}
{{- end -}}
{{- end -}}
