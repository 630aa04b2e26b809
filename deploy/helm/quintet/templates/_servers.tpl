{{/* A Deployment of servers: those that compute prompts for others (prefill), or all others. */}}
{{- define "quintet.servers" -}}
{{- $root := .root -}}
{{- $isPrefill := .isPrefill -}}
{{- with $root -}}
{{- $isApart := gt (int .Values.prefill.replicas) 0 -}}
{{- $suffix := ternary "-prefill" "" $isPrefill -}}
{{- $selector := ternary "quintet.prefillSelector" "quintet.selector" $isPrefill -}}
{{- $resources := ternary (.Values.prefill.resources | default .Values.resources) .Values.resources $isPrefill -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "quintet.name" . }}{{ $suffix }}
  labels: {{- include "quintet.labels" . | nindent 4 }}
spec:
  {{- if $isPrefill }}
  replicas: {{ .Values.prefill.replicas }}
  {{- else if eq .Values.autoscaling.kind "none" }}
  replicas: {{ .Values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include $selector . | nindent 6 }}
  strategy: {{- toYaml .Values.strategy | nindent 4 }}
  # A boot that fetches its model is no failed rollout.
  progressDeadlineSeconds: {{ add .Values.startSeconds 60 }}
  template:
    metadata:
      labels:
        {{- include $selector . | nindent 8 }}
        {{- include "quintet.version" . | nindent 8 }}
        {{- if $isApart }}
        {{- include "quintet.anyServer" . | nindent 8 }}
        {{- end }}
        {{- with .Values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        # Flags are read once: other ones need other pods.
        checksum/flags: {{ include (print $root.Template.BasePath "/config.yaml") $root | sha256sum }}
        {{- with .Values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add .Values.unlistSeconds .Values.drainSeconds 15 }}
      {{- with .Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with .Values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      securityContext: {{- include "quintet.podSecurity" . | nindent 8 }}
      containers:
        - name: {{ ternary "prefill" "quintet" $isPrefill }}
          image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          args:
            - serve
            {{- with .Values.model }}
            - {{ . | quote }}
            {{- end }}
            - --config=/etc/quintet/server.yaml
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
          {{- if or .Values.apiKey.secret .Values.hubToken.secret $isPrefill }}
          env:
            {{- if $isPrefill }}
            - name: POD_IP
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            {{- end }}
            {{- with .Values.apiKey.secret }}
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
          ports:
            - name: http
              containerPort: 8000
            {{- if $isPrefill }}
            # Of the first engine; each further one has the next.
            - name: kv
              containerPort: 5600
            {{- end }}
          # Ready for the first time: until then nobody else is asked.
          startupProbe:
            httpGet:
              path: /readyz
              port: http
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ max 1 (div .Values.startSeconds 5) }}
          # Requests go to pods that could serve one now.
          readinessProbe:
            httpGet:
              path: /readyz
              port: http
            periodSeconds: 2
            timeoutSeconds: 2
            failureThreshold: 2
          # Whether it lives, not whether it is well: a server whose process is being replaced heals itself, and a restart
          # would only make the pause longer. One that cannot heal ends by itself.
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
          resources:
            {{- with $resources.requests }}
            requests: {{- toYaml . | nindent 14 }}
            {{- end }}
            {{- if or $resources.limits .Values.gpus }}
            limits:
              {{- with $resources.limits }}
              {{- toYaml . | nindent 14 }}
              {{- end }}
              {{- with .Values.gpus }}
              nvidia.com/gpu: {{ . }}
              {{- end }}
            {{- end }}
          securityContext: {{- include "quintet.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - name: config
              mountPath: /etc/quintet
              readOnly: true
            {{- if $isApart }}
            - name: kv-key
              mountPath: /etc/quintet-kv
              readOnly: true
            {{- end }}
            - name: cache
              mountPath: /cache
            # Sockets, the key of the seal, kept responses.
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
      # Several pods on one node would share its memory bandwidth, which is what a decode step waits for.
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include $selector . | nindent 14 }}
      {{- with .Values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end -}}
{{- end -}}
