{{/* Pod template of a Deployment or LeaderWorkerSet. Kinds: server (single host), leader (host 0 of several), worker (other hosts),
     prefill (prefill server). */}}
{{- define "quintet.pod" -}}
{{- $root := .root -}}
{{- $kind := .kind -}}
{{- with $root -}}
{{- $isPrefill := eq $kind "prefill" -}}
{{- $isLeader := eq $kind "leader" -}}
{{- $isWorker := eq $kind "worker" -}}
{{- $isHost := or $isLeader $isWorker -}}
{{- $isApart := gt (int .Values.prefill.replicas) 0 -}}
{{- $selector := printf "quintet.%sSelector" $kind -}}
{{- $resources := ternary (.Values.prefill.resources | default .Values.resources) .Values.resources $isPrefill -}}
metadata:
  labels:
    {{- include $selector . | nindent 4 }}
    {{- include "quintet.version" . | nindent 4 }}
    {{- if or $isApart $isHost }}
    {{- include "quintet.anyServer" . | nindent 4 }}
    {{- end }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Flags are read at start: changed flags need new pods.
    checksum/flags: {{ include (print $root.Template.BasePath "/config.yaml") $root | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if not $isWorker }}
  terminationGracePeriodSeconds: {{ add .Values.unlistSeconds .Values.drainSeconds 15 }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {{- include "quintet.podSecurity" . | nindent 4 }}
  containers:
    - name: {{ ternary "quintet" $kind (eq $kind "server") }}
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        {{- with .Values.model }}
        - {{ . | quote }}
        {{- end }}
        - --config=/etc/quintet/server.yaml
        {{- if $isWorker }}
        - --headless
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- else }}
        - --host=0.0.0.0
        - --port=8000
        - --drain-timeout={{ .Values.drainSeconds }}
        {{- if .Values.apiKey.secret }}
        - --api-key=$(QUINTET_API_KEY)
        {{- end }}
        {{- if $isPrefill }}
        - --role=prefill
        - --kv-peer-listen=$(POD_IP):5600
        {{- else if $isApart }}
        - --role=decode
        - --kv-peers={{ .Values.prefill.network }}
        {{- end }}
        {{- if $isApart }}
        - --kv-peer-key=/etc/quintet-kv/key
        {{- end }}
        {{- if $isLeader }}
        # Equal to the startup probe: the other pods may still be downloading the model.
        - --boot-timeout={{ .Values.startSeconds }}
        - --node-rank=0
        - --master-addr=$(POD_IP)
        {{- end }}
        {{- end }}
        {{- if $isHost }}
        - --nnodes={{ .Values.hosts.size }}
        - --group-key=/etc/quintet-group/key
        {{- end }}
      {{- $apiKey := ternary "" .Values.apiKey.secret $isWorker }}
      {{- $needsAddress := or $isPrefill $isLeader }}
      {{- if or $apiKey .Values.hubToken.secret $needsAddress }}
      env:
        {{- if $needsAddress }}
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- end }}
        {{- with $apiKey }}
        - name: QUINTET_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.apiKey.key }}
        {{- end }}
        {{- with .Values.hubToken.secret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.hubToken.key }}
        {{- end }}
      {{- end }}
      {{- if not $isWorker }}
      ports:
        - name: http
          containerPort: 8000
        {{- if $isPrefill }}
        # Port of engine 0; engine i uses port + i.
        - name: kv
          containerPort: 5600
        {{- end }}
        {{- if $isLeader }}
        - name: hosts
          containerPort: 29501
        {{- end }}
      # Startup: the other probes begin after the first success.
      startupProbe:
        httpGet:
          path: /readyz
          port: http
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div .Values.startSeconds 5) }}
      # Readiness: the Service routes only to pods that accept requests.
      readinessProbe:
        httpGet:
          path: /readyz
          port: http
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      # Liveness, not health: a server that restarts one of its processes recovers by itself, and restarting the pod would
      # prolong the interruption. A server that cannot recover exits.
      livenessProbe:
        httpGet:
          path: /livez
          port: http
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command: ["sleep", "{{ .Values.unlistSeconds }}"]
      {{- end }}
      resources:
        {{- with $resources.requests }}
        requests: {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- if or $resources.limits .Values.gpus }}
        limits:
          {{- with $resources.limits }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
          {{- with .Values.gpus }}
          nvidia.com/gpu: {{ . }}
          {{- end }}
        {{- end }}
      securityContext: {{- include "quintet.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/quintet
          readOnly: true
        {{- if $isApart }}
        - name: kv-key
          mountPath: /etc/quintet-kv
          readOnly: true
        {{- end }}
        {{- if $isHost }}
        - name: group-key
          mountPath: /etc/quintet-group
          readOnly: true
        {{- end }}
        - name: cache
          mountPath: /cache
        # Sockets, the HMAC key of frames, stored responses.
        - name: run
          mountPath: /tmp
  volumes:
    - name: config
      configMap:
        name: {{ include "quintet.name" . }}
    {{- if $isApart }}
    - name: kv-key
      secret:
        secretName: {{ .Values.prefill.secret }}
        items:
          - key: {{ .Values.prefill.key }}
            path: key
        defaultMode: 0440
    {{- end }}
    {{- if $isHost }}
    - name: group-key
      secret:
        secretName: {{ .Values.hosts.secret }}
        items:
          - key: {{ .Values.hosts.key }}
            path: key
        defaultMode: 0440
    {{- end }}
    - name: run
      emptyDir:
        sizeLimit: 1Gi
    - name: cache
      {{- if include "quintet.claim" . }}
      persistentVolumeClaim:
        claimName: {{ include "quintet.claim" . }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .Values.cache.emptyDirLimit }}
      {{- end }}
  # Spread over nodes: pods on one node share its memory bandwidth, which limits decode.
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- if $isHost }}
          app.kubernetes.io/instance: {{ .Release.Name }}
          {{- include "quintet.anyServer" . | nindent 10 }}
          {{- else }}
          {{- include $selector . | nindent 10 }}
          {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
