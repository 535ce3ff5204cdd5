{{/* Names, labels and images; nothing here renders an object. */}}

{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The name of one role's objects: dict "root" $ "role" "rollout". */}}
{{- define "penstock.name" -}}
{{- printf "%s-%s" (include "penstock.fullname" .root) .role -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: nothing that changes with the chart, or every upgrade would restart every pod. */}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "penstock.registry" -}}
{{- required "expected image.registry, found none: set it to the registry that holds your images (docs/kubernetes.md says how to build them)" .Values.image.registry | trimSuffix "/" -}}
{{- end -}}

{{- define "penstock.image" -}}
{{- $own := (index .root.Values .role).image -}}
{{- if $own -}}{{ $own }}{{- else -}}
{{- printf "%s/%s%s:%s" (include "penstock.registry" .root) .root.Values.image.prefix .role (default .root.Chart.AppVersion .root.Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Who takes part: every role of this release, the bus aside. */}}
{{- define "penstock.roles" -}}
coordinator rollout reward trainer{{ if .Values.executor.enabled }} executor{{ end }}
{{- end -}}

{{- define "penstock.runId" -}}
{{- default .Release.Name .Values.run.id -}}
{{- end -}}

{{- define "penstock.busSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "bus")) .Values.bus.existingSecret -}}
{{- end -}}

{{- define "penstock.apiSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "api")) .Values.api.existingSecret -}}
{{- end -}}

{{/* A secret's value that was made at the first install, or a new one: dict "root" $ "name" … "key" …. `helm template` cannot
look it up and makes a new one each time: there, use secrets of your own. */}}
{{- define "penstock.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if $found }}{{ index $found.data .key | b64dec }}{{ else }}{{ randAlphaNum 40 }}{{ end -}}
{{- end -}}

{{- define "penstock.runsClaim" -}}
{{- default (include "penstock.name" (dict "root" . "role" "runs")) .Values.storage.runs.existingClaim -}}
{{- end -}}

{{/* A value of a role, else of `defaults`: dict "root" $ "role" … "key" …; answers YAML, empty where there is none. */}}
{{- define "penstock.value" -}}
{{- $own := index (index .root.Values .role) .key -}}
{{- with (default (index .root.Values.defaults .key) $own) -}}{{ toYaml . }}{{- end -}}
{{- end -}}
