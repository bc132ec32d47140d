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

{{- /* A size in MiB: of `memory`, or of a quantity of Kubernetes. */ -}}
{{- define "kvoffload.mebibytes" -}}
{{- $number := regexFind "^[0-9.]+" . | float64 -}}
{{- $unit := trimSuffix "B" (regexFind "[A-Za-z]*$" .) -}}
{{- $scale := get (dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) $unit -}}
{{- if not $scale }}{{ fail (printf "%s is no size that this chart knows" .) }}{{ end -}}
{{- divf (mulf $number $scale) 1048576 | ceil | int64 -}}
{{- end }}

{{- /* The server's resources: a limit that is not given follows from the pool. */ -}}
{{- define "kvoffload.resources" -}}
{{- $pool := include "kvoffload.mebibytes" .Values.memory | int64 -}}
{{- $limit := printf "%dMi" (add $pool (max (div $pool 8) 1024)) -}}
{{- $resources := merge (deepCopy .Values.resources) (dict "limits" (dict "memory" $limit)) -}}
{{- $given := toString $resources.limits.memory -}}
{{- if le (include "kvoffload.mebibytes" $given | int64) (add $pool (div $pool 30)) -}}
{{- fail (printf "resources.limits.memory %s does not hold a pool of memory %s, its index and the server: leave it out, or give %s" $given .Values.memory $limit) -}}
{{- end -}}
{{- toYaml (merge $resources (dict "requests" (dict "memory" $given))) -}}
{{- end }}
