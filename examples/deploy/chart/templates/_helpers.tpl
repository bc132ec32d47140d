{{- define "kvoffload.name" -}}
{{- if contains "kvoffload" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-kvoffload" .Release.Name }}{{ end -}}
{{- end }}

{{- define "kvoffload.selector" -}}
app.kubernetes.io/name: kvoffload
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvoffload.labels" -}}
{{ include "kvoffload.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvoffload.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "kvoffload.socket" -}}
{{ .Values.socketFolder }}/server
{{- end }}

{{- define "kvoffload.security" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user }}
runAsGroup: {{ .Values.group }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
