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
{{- coalesce .Values.bus.existingSecret .Values.valkey.existingSecret (include "penstock.name" (dict "root" . "role" "bus")) -}}
{{- end -}}

{{/* Bytes of a quantity of memory such as 8Gi. */}}
{{- define "penstock.bytes" -}}
{{- $suffix := regexFind "[A-Za-z]*$" . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if not (hasKey $units $suffix) -}}
{{- fail (printf "expected a quantity of memory such as 8Gi for valkey.resources.limits.memory, found %q" .) -}}
{{- end -}}
{{- mulf (trimSuffix $suffix . | float64) (get $units $suffix | float64) | int64 -}}
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

{{/* "yes" where the trainer is a JobSet: asked for, or `auto` and the cluster knows them. */}}
{{- define "penstock.jobSet" -}}
{{- $wanted := toString .Values.trainer.jobSet.enabled -}}
{{- $known := .Capabilities.APIVersions.Has "jobset.x-k8s.io/v1alpha2" -}}
{{- if and (eq $wanted "true") (not $known) -}}
{{- fail "expected the CRD of JobSet for trainer.jobSet.enabled, found no jobset.x-k8s.io/v1alpha2 in this cluster: install JobSet, or set it to auto or false" -}}
{{- end -}}
{{- if and $known (ne $wanted "false") -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where a replica of rollout is several pods, whose engine spans them. */}}
{{- define "penstock.leaderWorkerSet" -}}
{{- $nodes := int .Values.rollout.nodes -}}
{{- if gt $nodes 1 -}}
{{- if not (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}
{{- fail (printf "expected the CRD of LeaderWorkerSet for rollout.nodes = %d, found no leaderworkerset.x-k8s.io/v1 in this cluster: install LeaderWorkerSet, or set rollout.nodes to 1" $nodes) -}}
{{- end -}}
yes
{{- end -}}
{{- end -}}

{{- define "penstock.rolloutSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "rollout")) .Values.rollout.existingSecret -}}
{{- end -}}

{{- define "penstock.executorSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "executor")) .Values.executor.existingSecret -}}
{{- end -}}

{{/* Who sets the number of replicas: "keda", "hpa", or "" where a value does: dict "root" $ "role" "rollout". */}}
{{- define "penstock.scaler" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- $apis := .root.Capabilities.APIVersions -}}
{{- if $scaling.enabled -}}
{{- if $apis.Has "keda.sh/v1alpha1" -}}keda
{{- else if not ($apis.Has "external.metrics.k8s.io/v1beta1") -}}
{{- fail (printf "expected KEDA or an external metrics API for %s.autoscaling.enabled, found neither keda.sh/v1alpha1 nor external.metrics.k8s.io/v1beta1 in this cluster: install KEDA, or prometheus-adapter with the rule in docs/kubernetes.md, or disable it" .role) -}}
{{- else if lt (int $scaling.minReplicas) 1 -}}
{{- fail (printf "expected %s.autoscaling.minReplicas of at least 1 in a cluster without KEDA, found %d: a HorizontalPodAutoscaler does not scale to zero; set it to 1, or install KEDA" .role (int $scaling.minReplicas)) -}}
{{- else -}}hpa
{{- end -}}
{{- end -}}
{{- end -}}
